"""Studies of objectives by the age of their data. Every arm is tuned at every lag, in the same way, except for one arm
that has the same setting at all lags.

    python -m benchmarks.science.old_data.study TASK [--only ARM …] [--lags 64 …] [--seeds 0 …] [--jobs N] [--hours H]
    python -m benchmarks.science.old_data.study TASK --show        only show the tables of stored results

TASK is `quickstart` or `many-answers`. Each run takes `STEPS` steps on 16 prompts with 8 responses each: 32,768
trajectories. The lag is exact (benchmarks/science/lagged.py). A lag of 0 is on policy, and at a lag of 256 the base
policy generates all responses. Each seed has its own base policy.

A local search (`local_search.py`) chooses the learning rate and one further setting of each arm, such as beta, at each
lag, on `TUNING_SEEDS`. The chosen setting then runs on other seeds. The search looks for the best result after the last
step. For `quickstart` the result is accuracy: the mean probability of the right answer to held-out problems. For
`many-answers` it is the total variation to the exact target at `BETA`. Both are exact: no response is sampled.

Each finished run is a row of the CSV and is not repeated, so the command continues where it stopped.
"""

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product, takewhile
from pathlib import Path
from typing import Any

from benchmarks.harness.rows import append, read, spread
from benchmarks.harness.side_by_side import run_all
from benchmarks.science.lagged import Scored, lagged_run
from benchmarks.science.old_data.exact import examine_of
from benchmarks.science.old_data.local_search import FIXED, Ladder, Point, Search
from tba.config import Config
from tba.errors import RunFailed
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
SHIFTS = Ladder("objective.baseline_shift", (-0.8, -0.4, -0.2, -0.1, -0.05), 3)


@dataclass(frozen=True)
class Study:
    """The task of a study, and the measure by which its runs are compared."""

    task: str
    result: str  # the measure that the search compares
    sign: int  # 1 if higher results are better, -1 if lower ones are
    examinations: int  # evenly spaced over the steps

    @property
    def examined(self) -> Sequence[int]:
        return range(STEPS // self.examinations, STEPS + 1, STEPS // self.examinations)


STUDIES: Mapping[str, Study] = {
    "quickstart": Study("quickstart", "right", 1, 16),
    "many-answers": Study("benchmarks.science.old_data.many_answers:ManyAnswers", "total_variation", -1, 4),
}


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
    "TB, anchored at what sampled": Arm({"objective.anchor": "behaviour"}, BETAS),
    "TBA'": Arm({"objective.name": "tba-prime", "objective.reference_reset": 50}, BETAS),
    "Dr. GRPO": Arm({"objective.name": "dr-grpo"}, CLIPS),
    "Dr. GRPO, half from all data": Arm({"objective.name": "dr-grpo", **REPLAYED}, CLIPS),
    "CISPO": Arm({"objective.name": "dr-grpo", **CISPO}, CLIPS),
    "ScaleRL": Arm(SCALE_RL, CLIPS),
    "M2PO": Arm({"objective.name": "m2po"}, MOMENTS),
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
        return preset("quickstart").replace({**BASE, **own, **changes})


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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=STUDIES)
    parser.add_argument("--only", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    parser.add_argument("--lags", nargs="+", type=int, choices=LAGS, default=[64, 256, 16, 0, 4, 128, 1], metavar="LAG")
    parser.add_argument(
        "--seeds", nargs="*", type=int, default=SEEDS, metavar="SEED", help="if none: only run the searches"
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="runs at a time, a core each (%(default)s)")
    parser.add_argument("--hours", type=float, default=1000.0, help="start no run after this many hours")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", action="store_true", help="run nothing, show stored results")
    options = parser.parse_args(arguments)
    study = STUDIES[options.task]
    out = options.out or Path(f"docs/results/old-data-{options.task}.csv")
    rows = read(out, Row)

    def store(row: Row) -> None:
        rows.append(row)
        append(out, row)
        print(f"{row.arm}, lag {row.lag}, seed {row.seed}, {row.rate:g}, {row.second:g}: {row.result}", flush=True)

    if not options.show:
        run_all(
            lambda: missing(study, rows, options.only, options.lags, options.seeds),
            partial(take, study),
            store,
            jobs=options.jobs,
            hours=options.hours,
        )
    print("\n".join(markdown(study, rows)))


# --- runs -------------------------------------------------------------------------------------------------------------


def missing(
    study: Study, rows: Sequence[Row], names: Sequence[str], lags: Sequence[int], seeds: Sequence[int]
) -> Iterator[Run]:
    """Yield runs that have no row and can start now: first those of searches that have not ended, then the chosen
    settings on each reported seed."""
    done = {row.key for row in rows}
    chosen: list[tuple[int, str, Point]] = []
    for lag, name in product(lags, names):
        best, more = search_of(name).progress(scores(study, rows, name, lag))
        runs = [make_run(name, lag, TUNING_SEEDS[seed], point) for point, seed in more]
        yield from (run for run in runs if run not in done)
        if not more:
            chosen.append((lag, name, best))
    for seed, (lag, name, best) in product(seeds, chosen):
        if (run := make_run(name, lag, seed, best)) not in done:
            yield run


def search_of(name: str) -> Search:
    return Search((ARMS[name].rate, ARMS[name].second), len(TUNING_SEEDS))


def scores(study: Study, rows: Sequence[Row], name: str, lag: int) -> Mapping[Point, Sequence[float]]:
    """Return the score of each point of an arm's search that has been tried; higher scores are better."""
    found = {row.key: study.sign * row.result for row in rows if row.arm == name and row.lag == lag}
    first, second = search_of(name).ladders
    tried: dict[Point, list[float]] = {}
    for point in product(range(len(first.values)), range(len(second.values))):
        runs = [make_run(name, lag, seed, point) for seed in TUNING_SEEDS]
        tried[point] = [found[run] for run in takewhile(found.__contains__, runs)]
    return tried


def make_run(name: str, lag: int, seed: int, point: Point) -> Run:
    arm = ARMS[name]
    rate, second = arm.rate.values[point[0]], arm.second.values[point[1]]
    settings = json.dumps(dict(arm.settings), sort_keys=True)
    return Run(arm=name, lag=lag, seed=seed, rate=rate, second=second, settings=settings)


def take(study: Study, run: Run) -> Row:
    config, began, failed = run.config(study), time.process_time(), ""
    found: list[Scored] = []
    try:
        for score in lagged_run(config, scored_after=study.examined, examine=examine_of(config, beta=BETA)):
            found.append(score)  # keeps the results before a failure
    except RunFailed as error:
        failed = str(error)
    last = (
        found[-1]
        if found
        else Scored(step=0, measures={study.result: float(study.sign < 0)}, reward=0, age=0, generated=())
    )
    return Row(
        **asdict(run),
        result=round(last.measures[study.result], 4),
        measures=json.dumps({name: float(f"{value:.4g}") for name, value in last.measures.items()}),
        curve=" ".join(f"{it.step}:{it.measures[study.result]:.4f}" for it in found),
        age=round(last.age, 1),
        cpu_seconds=round(time.process_time() - began, 1),
        failed=failed,
    )


# --- results ----------------------------------------------------------------------------------------------------------


def reported(study: Study, rows: Sequence[Row], name: str, lag: int) -> list[Row]:
    """Return the rows of the chosen settings on the reported seeds. Empty until the search has ended."""
    best, more = search_of(name).progress(scores(study, rows, name, lag))
    keys = {make_run(name, lag, seed, best) for seed in SEEDS}
    return [] if more else [row for row in rows if row.key in keys]


def markdown(study: Study, rows: Sequence[Row]) -> Iterator[str]:
    yield f"| {study.result.replace('_', ' ')} | {' | '.join(f'lag {lag}' for lag in LAGS)} |"
    yield "|---|" + "---:|" * len(LAGS)
    found = {(name, lag): reported(study, rows, name, lag) for name, lag in product(ARMS, LAGS)}
    for name in ARMS:
        cells = [spread([row.result for row in found[name, lag]]) for lag in LAGS]
        if any(cells):
            yield f"| {name} | {' | '.join(cells)} |"
    yield ""
    yield f"| learning rate and second setting | {' | '.join(f'lag {lag}' for lag in LAGS)} |"
    yield "|---|" + "---:|" * len(LAGS)
    for name in ARMS:
        cells = [_setting(study, rows, name, lag) for lag in LAGS]
        if any(cells):
            yield f"| {name} | {' | '.join(cells)} |"


def _setting(study: Study, rows: Sequence[Row], name: str, lag: int) -> str:
    """Return the chosen setting of an arm, or an empty text if the search has not ended."""
    best, more = search_of(name).progress(scores(study, rows, name, lag))
    arm = ARMS[name]
    values = [arm.rate.values[best[0]], *([] if arm.second is FIXED else [arm.second.values[best[1]]])]
    return "" if more else ", ".join(f"{value:g}" for value in values)


if __name__ == "__main__":
    main()
