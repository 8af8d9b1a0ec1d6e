"""Measure the effect of m, k, K, beta and the buffer, by runs with one setting changed: figure 7 and table 6 of the TBA
paper in small.

    python -m benchmarks.science.old_data.one_change TASK [--only FACTOR …] [--seeds 0 …] [--jobs N] [--hours H]
    python -m benchmarks.science.old_data.one_change TASK --show        only show the table and charts of stored results

TASK is `quickstart` or `many-answers` (benchmarks/science/old_data/study.py, which also describes the policy and the
measures). Each run takes `STEPS` steps of 128 responses with trajectory balance. The searcher is one sync behind the
trainer and generates as many responses as the trainer learns from; half of each batch is drawn from the newest sync and
the other half from all data. In each run one setting has another value, and everything else is as in the row "as it
was". A batch has 128 responses for every K, and a sync has k rounds' worth of prompts, so all runs see the same number
of responses.

Each finished run is a row of the CSV and is not repeated, so the command continues where it stopped.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness.rows import append, line, read, spread
from benchmarks.harness.side_by_side import run_all
from benchmarks.science.lagged import lagged_run
from benchmarks.science.old_data.arms import BASE, BETA, PROMPTS, RESPONSES, STEPS, STUDIES, Study
from benchmarks.science.old_data.exact import examine_of
from flows.pages.charts import Chart
from tba.config import Config
from tba.errors import RunFailed
from tba.presets import preset

SEEDS, EVERY, BATCH = (0, 1, 2), 4, PROMPTS * RESPONSES
COMMON: Mapping[str, Any] = {
    **BASE,
    "training.learning_rate": 3e-4,
    "sampling.recent_share": 0.5,
    "sampling.copies": "newest",
    "sync.lag": 1,
    "sync.keep_versions": 4,
}


def shape(*, every: int = EVERY, responses: int = RESPONSES) -> Mapping[str, Any]:
    """Return the settings of so many steps per sync and responses per prompt."""
    prompts = BATCH // responses
    return {
        "sync.every": every, "search.prompts_per_round": prompts * every, "search.responses_per_prompt": responses,
        "training.prompts_per_step": prompts, "training.responses_per_prompt": responses,
        "training.groups_per_micro_batch": prompts,
    }  # fmt: skip


def line_to_beta(start: float, steps: int) -> Mapping[str, Any]:
    return {"objective.beta_start": start, "objective.beta_target": steps, "objective.beta_stop": steps}


AS_IT_WAS = "as it was"
FACTORS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    AS_IT_WAS: {"": {}},
    "m, the share of the newest": {str(m): {"sampling.recent_share": m} for m in (0.0, 0.25, 0.75, 0.95)},
    "k, steps per sync": {str(k): shape(every=k) for k in (1, 2, 8, 16)},
    "K, responses per prompt": {str(k): shape(responses=k) for k in (2, 4, 16)},
    "beta": {
        str(beta): {"objective.beta_start": beta, "objective.beta_end": beta} for beta in (0.0125, 0.025, 0.1, 0.2)
    },
    "beta falls from 1": {f"{steps} steps": line_to_beta(1.0, steps) for steps in (32, 128)},
    "buffer, steps": {str(age): {"sampling.max_age": age} for age in (8, 16, 64)},
    "inverse temperature of rewards": {str(t): {"sampling.inv_temp": t} for t in (1.0, 4.0)},
    "bounds of a prompt's mean reward": {
        f"{low:g}-{high:g}": {"sampling.mean_reward_between": [low, high]} for low, high in ((0, 1), (0.2, 0.8))
    },
}
"""Changed settings, by factor and value."""

PICTURES: Mapping[str, tuple[str, float, Callable[[float], float]]] = {
    "m": ("m, the share of the newest", COMMON["sampling.recent_share"], float),
    "sync": ("k, steps per sync", EVERY, math.log2),
    "responses": ("K, responses per prompt", RESPONSES, math.log2),
    "beta": ("beta", BETA, math.log2),
    "buffer": ("buffer, steps", STEPS, math.log2),
}
"""Charts by the end of their file names: a factor whose values are numbers, its value in `COMMON`, and the scale of its
axis."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The identity of a run: the first columns of its row of the CSV."""

    factor: str
    value: str
    seed: int

    def config(self, study: Study) -> Config:
        changes = {**COMMON, **shape(), **FACTORS[self.factor][self.value]}
        return preset("quickstart").replace({"task.name": study.task, "seed": self.seed, **changes})


@dataclass(frozen=True, kw_only=True)
class Row(Run):
    right: float  # probability of a right answer after the last step
    total_variation: float  # from the exact target at `BETA`
    answers: float  # number of right answers that a uniform choice with the same entropy has
    reward: float  # mean of what was learned from in the second half, like the age
    age: float
    failed: str  # why the run ended early, or empty; it then has no results

    @property
    def key(self) -> Run:
        return Run(factor=self.factor, value=self.value, seed=self.seed)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=STUDIES)
    parser.add_argument("--only", nargs="+", choices=FACTORS, default=list(FACTORS), metavar="FACTOR")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, metavar="SEED")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="runs at a time, a core each (%(default)s)")
    parser.add_argument("--hours", type=float, default=1000.0, help="start no run after this many hours")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", action="store_true", help="run nothing, show stored results")
    options = parser.parse_args(arguments)
    study = STUDIES[options.task]
    out = options.out or Path(f"docs/results/one-change-{options.task}.csv")
    rows = read(out, Row)

    def missing() -> Iterator[Run]:
        done = {row.key for row in rows}
        for seed in options.seeds:
            for factor in options.only:
                runs = [Run(factor=factor, value=value, seed=seed) for value in FACTORS[factor]]
                yield from (run for run in runs if run not in done)

    def store(row: Row) -> None:
        rows.append(row)
        append(out, row)
        print(row, flush=True)

    if not options.show:
        run_all(missing, partial(take, study), store, jobs=options.jobs, hours=options.hours)
    print("\n".join(markdown(rows)))
    for name, it in PICTURES.items():
        if drawn := by_value(rows, *it):
            out.with_name(f"{out.stem}-{name}.svg").write_text(drawn)


def take(study: Study, run: Run) -> Row:
    config, failed = run.config(study), ""
    found: Mapping[str, float] = {}
    reward = age = math.nan
    try:
        for score in lagged_run(config, scored_after=(STEPS // 2, STEPS), examine=examine_of(config, beta=BETA)):
            found, reward, age = score.measures, score.reward, score.age
    except RunFailed as error:
        found, failed = {}, str(error)
    right, distance, answers = (round(found.get(name, math.nan), 4) for name in ("right", "total_variation", "answers"))
    return Row(
        **asdict(run), right=right, total_variation=distance, answers=answers, reward=round(reward, 4),
        age=round(age, 1), failed=failed,
    )  # fmt: skip


# --- tables and charts ------------------------------------------------------------------------------------------------


def markdown(rows: Sequence[Row]) -> Iterator[str]:
    yield "| | value | seeds | right | total variation | answers | reward of what was drawn | its mean age |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|"
    for factor, values in FACTORS.items():
        for value in values:
            of = [row for row in rows if (row.factor, row.value) == (factor, value) and not row.failed]
            if of:
                cells = [spread([getattr(row, it) for row in of]) for it in ("right", "total_variation")]
                cells += [spread([row.answers for row in of], 1), spread([row.reward for row in of])]
                yield f"| {factor} | {value} | {len(of)} | {' | '.join(cells)} | {spread([row.age for row in of], 1)} |"


def by_value(rows: Sequence[Row], factor: str, as_it_was: float, place: Callable[[float], float]) -> str:
    """Return a chart of the results by value; empty if only one value has been measured."""
    of = {as_it_was: [row for row in rows if row.factor == AS_IT_WAS]}
    of |= {float(it): [row for row in rows if (row.factor, row.value) == (factor, it)] for it in FACTORS[factor]}
    known = {place(value): of[value] for value in sorted(of) if of[value]}
    lines = {"probability of a right answer": "right", "total variation to the target": "total_variation"}
    series = [
        line(name, {at: [getattr(row, column) for row in found if not row.failed] for at, found in known.items()})
        for name, column in lines.items()
    ]
    symbol = factor.partition(",")[0]
    name = symbol if place is float else f"log2 {symbol}"
    return Chart(factor, series, x_name=name).picture() if len(known) > 1 else ""


if __name__ == "__main__":
    main()
