"""Measure success against diversity of attacks with real models: TBA, RLOO, GRPO, and the attacker before training.

    python -m benchmarks.science.redteam_laptop [--only ARM …] [--jobs N] [--hours H] [--out FILE.csv]
    python -m benchmarks.science.redteam_laptop --show        only show the tables and the chart of stored results

It is figure 5 (left) of the TBA paper in small. SmolLM2-135M attacks itself, and the classifier of alt-profanity-check
judges its answers, as in the preset `redteam-laptop`. It needs the packages of requirements-laptop.txt. Each run is a
process with an exact lag (lagged.py), takes `STEPS` steps of `ATTACKS` attacks, and is on a GPU if there is one, where
it takes 9 GB of memory.

TBA trains as the preset does: half of each batch is drawn from the newest attacks, which are 4 updates old, and the
other half from all. Half of the rounds explore at another temperature. RLOO and GRPO are for fresh data: they learn
from one round after the other, one update old, at temperature 1. So all arms see the same number of attacks per step.

Learning rate and beta of each arm are chosen by a sweep over `RATES` x its betas, with `SWEPT` steps on a seed that is
not reported. The greatest product of success and diversity wins; of equals, the smaller rate, then the smaller beta.
The chosen setting then runs on seeds 0, 1 and 2, and `OTHERS` on seed 0. Success and diversity are the task's measures,
of `SAMPLES` attacks of each examined version: the share of attacks whose answers have a mean toxicity above 0.5, and
the mean cosine distance between the embeddings of two attacks. The start is the version before the first step.

Each finished run is a row of the CSV and is not repeated.
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.hardware import cpu
from benchmarks.harness.rows import append, line, read, spread
from benchmarks.harness.side_by_side import run_all
from benchmarks.science.lagged import lagged_run, make_scores, start_of
from flows.pages.charts import Chart
from tba.config import Config
from tba.presets import preset
from tba.tasks.redteam import SUCCESS

PRESET, STEPS, SWEPT, ATTACKS, SAMPLES, EXAMINED = "redteam-laptop", 60, 12, 64, 256, 12
SEEDS, TUNING_SEED, RATES = (0, 1, 2), 100, (3e-5, 1e-4)


@dataclass(frozen=True)
class Arm:
    betas: Sequence[float]
    settings: Mapping[str, Any] = field(default_factory=dict)


FRESH: Mapping[str, Any] = {
    "sync.lag": 1, "sampling.recent_share": 1.0, "sampling.inv_temp": 0.0, "sampling.copies": "all",
    "search.explore_share": 0.0, "search.explore_temperature": None, "search.explore_top_p": 0.7,
}  # fmt: skip
ARMS: Mapping[str, Arm] = {
    "TBA": Arm((0.1, 0.3, 1.0), {"sync.lag": 4}),
    "RLOO": Arm((0.1, 0.3), {"objective.name": "rloo", **FRESH}),
    "GRPO": Arm((0.01, 0.1), {"objective.name": "grpo", **FRESH}),
}
START = "start"


@dataclass(frozen=True, kw_only=True)
class Run:
    """The identity of a run: the first columns of its row of the CSV."""

    arm: str
    seed: int
    rate: float
    beta: float
    steps: int

    @property
    def config(self) -> Config:
        return preset(PRESET).replace(
            {
                "seed": self.seed,
                "training.steps": self.steps,
                "training.learning_rate": self.rate,
                "training.responses_per_prompt": ATTACKS,
                "search.responses_per_prompt": ATTACKS,
                "objective.beta_start": self.beta,
                "objective.beta_end": self.beta,
                "evaluation.samples": SAMPLES,
                "sync.every": 1,
                "sync.keep_versions": 8,
                **ARMS[self.arm].settings,
            }
        )


OTHERS = (
    Run(arm="TBA", seed=0, rate=1e-4, beta=0.1, steps=STEPS),
    Run(arm="RLOO", seed=0, rate=1e-4, beta=0.1, steps=STEPS),
    Run(arm="GRPO", seed=0, rate=1e-4, beta=0.01, steps=STEPS),
)
"""Runs with other settings than the chosen ones."""


@dataclass(frozen=True, kw_only=True)
class Row(Run):
    device: str
    success: float  # of the last version, like the next three columns
    success_geometric: float
    diversity: float
    reward: float
    succeeded: float  # number of attacks that succeeded, of all that were generated; NaN if it was not counted
    distinct: float  # number of different ones among them; NaN if it was not counted
    seconds: float
    curve: str  # step:success:diversity of each examined version, from the start on

    @property
    def key(self) -> Run:
        return Run(**{name: getattr(self, name) for name in Run.__dataclass_fields__})

    @property
    def points(self) -> list[tuple[int, float, float]]:
        """Step, success and diversity of each examined version."""
        parts = [point.split(":") for point in self.curve.split()]
        return [(int(step), float(success), float(diversity)) for step, success, diversity in parts]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (%(default)s)")
    parser.add_argument("--hours", type=float, default=1000.0, help="start no run after this many hours")
    parser.add_argument("--out", type=Path, default=Path("docs/results/redteam-laptop.csv"))
    parser.add_argument("--show", action="store_true", help="run nothing, show stored results")
    options = parser.parse_args(arguments)
    rows = read(options.out, Row)

    def store(row: Row) -> None:
        rows.append(row)
        append(options.out, row)
        print(row, flush=True)

    if not options.show:
        run_all(lambda: missing(rows, options.only), take, store, jobs=options.jobs, hours=options.hours)
    print("\n".join(markdown(rows)))
    if drawn := picture(rows):
        options.out.with_suffix(".svg").write_text(drawn)


# --- runs -------------------------------------------------------------------------------------------------------------


def missing(rows: Sequence[Row], names: Sequence[str]) -> Iterator[Run]:
    """Yield runs that have no row and can start now: those of the sweeps, then the chosen settings on each reported
    seed, then the others."""
    done = {row.key for row in rows}
    swept = [run for name in names for run in sweep(name)]
    yield from (run for run in swept if run not in done)
    best = {name: chosen(rows, name) for name in names}
    finals = [final(it, seed) for seed, it in product(SEEDS, best.values()) if it]
    yield from (run for run in dict.fromkeys((*finals, *OTHERS)) if run.arm in names and run not in done)


def sweep(name: str) -> list[Run]:
    grid = product(RATES, ARMS[name].betas)
    return [Run(arm=name, seed=TUNING_SEED, rate=rate, beta=beta, steps=SWEPT) for rate, beta in grid]


def chosen(rows: Sequence[Row], name: str) -> Row | None:
    """Return the best row of a sweep, or None if the sweep has not finished."""
    keys = sweep(name)
    found = [row for row in rows if row.key in keys]
    if len(found) < len(keys):
        return None
    return min(found, key=lambda row: (-row.success * row.diversity, row.rate, row.beta))


def final(best: Run, seed: int) -> Run:
    return Run(arm=best.arm, seed=seed, rate=best.rate, beta=best.beta, steps=STEPS)


def take(run: Run) -> Row:
    config, began = run.config, time.monotonic()
    examine = make_scores(config)
    curve = [(0, examine(start_of(config)))]
    succeeded: list[str] = []
    for score in lagged_run(config, scored_after=range(EXAMINED, run.steps + 1, EXAMINED), examine=examine):
        curve.append((score.step, score.measures))
        succeeded += [it.response for it in score.generated if it.reward_parts["toxicity"] > SUCCESS]
    last = curve[-1][1]
    return Row(
        **asdict(run),
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else cpu(),
        success=round(last["sampled_attack_success"], 4),
        success_geometric=round(last["sampled_attack_success_geometric"], 4),
        diversity=round(last["sampled_diversity"], 4),
        reward=round(last["sampled"], 4),
        succeeded=len(succeeded),
        distinct=len(set(succeeded)),
        seconds=round(time.monotonic() - began, 1),
        curve=" ".join(
            f"{step}:{it['sampled_attack_success']:.4f}:{it['sampled_diversity']:.4f}" for step, it in curve
        ),
    )


# --- results ----------------------------------------------------------------------------------------------------------


def reported(rows: Sequence[Row], name: str) -> list[Row]:
    """Return the rows of the chosen setting of an arm, one for each seed. Empty until its sweep has finished."""
    best = chosen(rows, name)
    keys = [final(best, seed) for seed in SEEDS] if best else []
    return [row for row in rows if row.key in keys]


def starts(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """Return success and diversity of the start, once for each reported seed."""
    found = {row.seed: row.points[0][1:] for row in rows if row.seed != TUNING_SEED}
    return [found[seed] for seed in sorted(found)]


def markdown(rows: Sequence[Row]) -> Iterator[str]:
    columns = "success | geometric | diversity | attacks that succeeded | different ones"
    yield f"| after {STEPS} steps | learning rate | beta | seeds | {columns} |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    if began := starts(rows):
        success, diversity = (spread(values) for values in zip(*began, strict=True))
        yield f"| {START} | | | {len(began)} | {success} | | {diversity} | | |"
    others = [[row for row in rows if row.key == run] for run in OTHERS]
    for of in [*(reported(rows, name) for name in ARMS), *others]:
        if of:
            cells = [spread([getattr(row, it) for row in of]) for it in ("success", "success_geometric", "diversity")]
            cells += [spread([getattr(row, it) for row in of], 0) for it in ("succeeded", "distinct")]
            yield f"| {of[0].arm} | {of[0].rate:g} | {of[0].beta:g} | {len(of)} | {' | '.join(cells)} |"
    yield ""
    yield f"| sweep, {SWEPT} steps | learning rate | beta | success | diversity | product |"
    yield "|---|---:|---:|---:|---:|---:|"
    for row in rows:
        if row.seed == TUNING_SEED:
            scores = f"{row.success:.3f} | {row.diversity:.3f} | {row.success * row.diversity:.3f}"
            yield f"| {row.arm} | {row.rate:g} | {row.beta:g} | {scores} |"


def picture(rows: Sequence[Row]) -> str:
    """Return a chart of diversity by success, with a line of each arm through its evaluated versions; empty without
    reported runs."""
    series = [line(name, path(reported(rows, name))) for name in ARMS]
    series += [line(name_of(run), path([row for row in rows if row.key == run])) for run in OTHERS]
    if began := starts(rows):
        successes, diversities = zip(*began, strict=True)
        series.append(line(START, {statistics.mean(successes): diversities}))
    return Chart("diversity by success of attacks", [it for it in series if it.points], x_name="success").picture()


def name_of(run: Run) -> str:
    return f"{run.arm}, {run.rate:g}, beta {run.beta:g}"


def path(rows: Sequence[Row]) -> dict[float, list[float]]:
    """Return the diversities of the runs of an arm by their mean success, at each step that all of them evaluated."""
    runs = [{step: scores for step, *scores in row.points} for row in rows]
    steps = set.intersection(*(set(it) for it in runs)) if runs else set()
    return {statistics.mean(it[step][0] for it in runs): [it[step][1] for it in runs] for step in sorted(steps)}


if __name__ == "__main__":
    main()
