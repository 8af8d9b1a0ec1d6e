"""The studies of objectives by the age of their data: tasks, arms, runs, and the settings that a search has chosen."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product, takewhile
from typing import Any

from benchmarks.science.old_data.local_search import FIXED, Ladder, Point, Search
from tba.config import Config
from tba.presets import preset

STEPS, PROMPTS, RESPONSES, BETA = 256, 16, 8, 0.05
BASE: Mapping[str, Any] = {
    "training.steps": STEPS,
    "training.decay_steps": STEPS // 2,
    "training.prompts_per_step": PROMPTS,
    "training.responses_per_prompt": RESPONSES,
    "training.groups_per_micro_batch": PROMPTS,
    "training.adam_beta1": 0.9,
    "search.prompts_per_round": PROMPTS,
    "search.responses_per_prompt": RESPONSES,
    "search.initial_fill": PROMPTS * RESPONSES,
    "sampling.recent_share": 1.0,
    "sampling.copies": "all",
    "sync.every": 1,
    "objective.beta_start": BETA,
    "objective.beta_end": BETA,
}
LAGS, SEEDS, TUNING_SEEDS = (0, 1, 4, 16, 64, 128, 256), range(10), (100, 101, 102)

RATE = Ladder("training.learning_rate", (1.875e-5, 3.75e-5, 7.5e-5, 1.5e-4, 3e-4, 6e-4, 1.2e-3, 2.4e-3), 4)
BETAS = Ladder("objective.beta_end", (0.0125, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0), 2)
SHARES = Ladder("objective.behaviour_share", (0.2, 0.5, 0.8, 0.9, 0.95), 2)
CLIPS = Ladder("objective.clip_high", (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4), 2)
MOMENTS = Ladder("objective.second_moment", (0.0025, 0.01, 0.04, 0.16, 0.64), 2)
CONTRIBUTIONS = Ladder("objective.positive_contribution", (0.2, 0.3, 0.4, 0.5, 0.6, 0.7), 2)
SHIFTS = Ladder("objective.baseline_shift", (-0.8, -0.4, -0.2, -0.1, -0.05), 3)


@dataclass(frozen=True)
class Study:
    """The task of a study, and the measure by which its runs are compared."""

    task: str
    result: str  # the measure that the search compares
    sign: int  # 1 if higher results are better, -1 if lower ones are
    examinations: int  # evenly spaced over the steps
    goal: float | None = None  # the result whose cost is reported
    steps: int = STEPS
    settings: Mapping[str, Any] = field(default_factory=dict)  # changes to `BASE` in all runs
    starts: Mapping[str, float] = field(default_factory=dict)  # where the ladders of these settings start instead

    @property
    def examined(self) -> Sequence[int]:
        return range(self.steps // self.examinations, self.steps + 1, self.steps // self.examinations)


STUDIES: Mapping[str, Study] = {
    "quickstart": Study("quickstart", "right", 1, 16, goal=0.9),
    "many-answers": Study(
        "benchmarks.science.old_data.many_answers:ManyAnswers",
        "total_variation",
        -1,
        4,
        steps=1024,
        settings={"training.decay_steps": 768, "objective.beta_start": 0.25, "objective.beta_end": 0.25},
        starts={"training.learning_rate": 7.5e-5, "objective.beta_end": 0.25},
    ),
}
"""The total variation of `many-answers` has two parts (arm TB, seed 100). One is the share of wrong answers. The other
is how far the shares of right answers have moved, and it comes from the noise of rewards divided by beta. On policy at
3e-4 and beta 0.05, 48 steps halve the number of different answers, which hardly comes back: after 256 steps 0.96 of
the answers are right, at a total variation of 0.49. At lower rates and beta 0.25, whose target is 0.02 from that of
`BETA`, right answers keep their shares: at a lag of 64 and 7.5e-5, total variation is 0.19 after 384 steps, and 0.15
of it is wrong answers, which need more steps. At 1.5e-4 their share swings between 0.26 and 0.37 until the rate
decays, as the lag delays what a step learns from; after 640 steps total variation is 0.19 too. So searches begin at
7.5e-5 and beta 0.25, runs have four times the steps of `quickstart`, and the rate decays in the last three quarters of
them. Even the exact gradient of the target takes long: 120 steps on 3 prompts with all their right answers lead to
0.14, of which 0.12 is wrong answers. The measure itself has no noise, as it sums over all right answers."""


@dataclass(frozen=True)
class Arm:
    settings: Mapping[str, Any] = field(default_factory=dict)
    second: Ladder = FIXED
    rate: Ladder = RATE


WEIGHTED: Mapping[str, Any] = {"objective.weights": "ratio"}
REPLAYED: Mapping[str, Any] = {"sampling.recent_share": 0.5}
"""Half of each batch is drawn from all data."""
PAIRS: Mapping[str, Any] = {
    "training.prompts_per_step": PROMPTS * RESPONSES // 2, "training.responses_per_prompt": 2,
    "search.prompts_per_round": PROMPTS * RESPONSES // 2, "search.responses_per_prompt": 2,
    "training.groups_per_micro_batch": PROMPTS * RESPONSES // 2,
}  # fmt: skip
"""For objectives that learn from the best and the worst response of each group: the same number of responses."""
CISPO: Mapping[str, Any] = {"objective.correction": "cispo", "objective.clip_low": 1.0}
SCALE_RL: Mapping[str, Any] = {
    "objective.name": "grpo", "objective.standardised_by": "batch", "objective.normaliser": "group",
    "objective.penalty": "none", **CISPO,
}  # fmt: skip

ARMS: Mapping[str, Arm] = {
    "TB": Arm(second=BETAS),
    "TB, weighted": Arm(WEIGHTED, BETAS),
    "TB, half from all data": Arm(REPLAYED, BETAS),
    "TB, weighted, half from all data": Arm({**WEIGHTED, **REPLAYED}, BETAS),
    "TB, weighted, half from all data, not tuned": Arm({**WEIGHTED, **REPLAYED}, rate=Ladder(RATE.setting, (3e-4,), 0)),
    "Proximal TB": Arm({}, SHARES),
    "Proximal TB, weighted": Arm(WEIGHTED, SHARES),
    "Proximal TB, share from the data": Arm({"objective.behaviour_share": "measured"}, BETAS),
    "TB, anchored at what sampled": Arm({"objective.anchor": "behaviour"}, BETAS),
    "TBA'": Arm({"objective.name": "tba-prime", "objective.reference_reset": 50}, BETAS),
    "Dr. GRPO": Arm({"objective.name": "dr-grpo"}, CLIPS),
    "Dr. GRPO, half from all data": Arm({"objective.name": "dr-grpo", **REPLAYED}, CLIPS),
    "CISPO": Arm({"objective.name": "dr-grpo", **CISPO}, CLIPS),
    "ScaleRL": Arm(SCALE_RL, CLIPS),
    "M2PO": Arm({"objective.name": "m2po"}, MOMENTS),
    "BAPO": Arm({"objective.name": "bapo"}, CONTRIBUTIONS),
    "AsymRE": Arm({"objective.name": "rloo", "objective.penalty": "none"}, SHIFTS),
    "RLOO, no penalty": Arm({"objective.name": "rloo", "objective.penalty": "none"}),
    "Proximal RLOO": Arm({"objective.name": "proximal-rloo"}, CLIPS),
    "PPO": Arm({"objective.name": "ppo"}, BETAS),
    "Online DPO": Arm({"objective.name": "online-dpo", **PAIRS}, BETAS),
    "OAPL": Arm({"objective.name": "oapl"}, BETAS),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """The identity of a run: the first columns of its row of the CSV."""

    arm: str
    lag: int
    seed: int
    rate: float
    second: float  # the value of the arm's second setting, or 0
    settings: str  # JSON of all other changes to quickstart and `BASE`

    def config(self, study: Study) -> Config:
        changes = {**json.loads(self.settings), RATE.setting: self.rate}
        if (second := ARMS[self.arm].second) is not FIXED:
            changes[second.setting] = self.second
        if "objective.beta_end" in changes:
            changes["objective.beta_start"] = changes["objective.beta_end"]
        own = {"task.name": study.task, "seed": self.seed, "sync.lag": self.lag, "sync.keep_versions": self.lag + 2}
        return preset("quickstart").replace({**BASE, "training.steps": study.steps, **study.settings, **own, **changes})


@dataclass(frozen=True, kw_only=True)
class Row(Run):
    result: float  # the measure that the search compares, after the last step
    measures: str  # JSON of all measures after the last step
    curve: str  # step:result of each examination
    age: float  # mean over the trajectories that were learned from since the last but one examination
    cpu_seconds: float
    failed: str  # why the run ended early, or empty; a failed run has its last results

    @property
    def key(self) -> Run:
        return Run(**{name: getattr(self, name) for name in Run.__dataclass_fields__})


def make_run(name: str, lag: int, seed: int, point: Point) -> Run:
    arm = ARMS[name]
    rate, second = arm.rate.values[point[0]], arm.second.values[point[1]]
    settings = json.dumps(dict(arm.settings), sort_keys=True)
    return Run(arm=name, lag=lag, seed=seed, rate=rate, second=second, settings=settings)


# --- the search of an arm ---------------------------------------------------------------------------------------------


def progress(study: Study, rows: Sequence[Row], name: str, lag: int) -> tuple[Point, list[tuple[Point, int]]]:
    """Return the best point of an arm's search so far, and the points to try next. None are left when the search has
    ended."""
    return search_of(study, name).progress(scores(study, rows, name, lag))


def search_of(study: Study, name: str) -> Search:
    return Search((_started(study, ARMS[name].rate), _started(study, ARMS[name].second)), len(TUNING_SEEDS))


def _started(study: Study, ladder: Ladder) -> Ladder:
    """Return a ladder that starts where the study says, if the ladder has this value."""
    start = study.starts.get(ladder.setting)
    return replace(ladder, start=ladder.values.index(start)) if start in ladder.values else ladder


def scores(study: Study, rows: Sequence[Row], name: str, lag: int) -> Mapping[Point, Sequence[float]]:
    """Return the score of each point of an arm's search that has been tried; higher scores are better."""
    found = {row.key: study.sign * row.result for row in rows if row.arm == name and row.lag == lag}
    first, second = search_of(study, name).ladders
    tried: dict[Point, list[float]] = {}
    for point in product(range(len(first.values)), range(len(second.values))):
        runs = [make_run(name, lag, seed, point) for seed in TUNING_SEEDS]
        tried[point] = [found[run] for run in takewhile(found.__contains__, runs)]
    return tried
