"""Measure the effect of m, k, K, beta and the buffer on the same trajectories, by replays of a run with one change.

    python -m benchmarks.science.ablations [ROOT] [--only FACTOR …] [--seeds 0 …] [--hours H] [--out FILE.csv]
    python -m benchmarks.science.ablations --show        only show the table and the charts of stored results

Each seed has one asynchronous quickstart run of 200 steps; the learning rate decays over the second half, as in the
preset. Its searcher generates S = 16 responses per prompt, so that K can vary. Each replay is a
`tba fork --step 0 --replay` of this run with one setting changed, in which only evaluations generate new responses. So
replays cannot show what searchers would have found with the changed policy. A batch has 256 trajectories for every K.
With another k, the same trajectories enter by the same step, or a little later.

Each replay is a row of the CSV and is not repeated, so the command continues where it stopped. Runs are kept under
ROOT.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import storage
from benchmarks.harness.rows import append, line, read, spread
from benchmarks.replays import LEARNED
from benchmarks.science.runs import finished, tba
from flows.pages.charts import Chart
from storage.layout import run_url
from tba.presets import preset

PARENT: Mapping[str, Any] = {"search.responses_per_prompt": 16, "search.prompts_per_round": 32}
SCORE = "select value from evaluations where metric = $metric and not abandoned order by step desc limit 1"

FACTORS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "as it was": {"": {}},
    "m, the share of the newest": {
        str(m): {"sampling.recent_share": m} for m in (0.0, 0.25, 0.75, 0.95)
    },
    "k, steps per sync": {str(k): {"sync.every": k} for k in (1, 2, 8, 16)},
    "K, responses per prompt": {
        str(k): {"training.responses_per_prompt": k, "training.prompts_per_step": 256 // k,
                 "training.groups_per_micro_batch": 256 // k}
        for k in (2, 4, 16)
    },
    "beta": {
        str(beta): {"objective.beta_start": beta, "objective.beta_end": beta} for beta in (0.0125, 0.025, 0.1, 0.2)
    },
    "capacity, responses per prompt": {str(n): {"sampling.capacity": n} for n in (8, 16)},
    "inverse temperature of rewards": {str(t): {"sampling.inv_temp": t} for t in (1.0, 4.0)},
    "bounds of a prompt's mean reward": {
        f"{low:g}-{high:g}": {"sampling.mean_reward_between": [low, high]} for low, high in ((0, 1), (0.2, 0.8))
    },
}  # fmt: skip
"""Changed settings, by factor and value."""

PICTURES: Mapping[str, tuple[str, Callable[[float], float]]] = {
    "m": ("m, the share of the newest", float),
    "sync": ("k, steps per sync", math.log2),
    "responses": ("K, responses per prompt", math.log2),
    "beta": ("beta", math.log2),
}
"""Charts by the end of their file names: a factor whose values are numbers, and the scale of its axis."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    factor: str
    value: str
    seed: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class Row(Replay):
    sampled: float
    greedy: float
    drawn_reward: float
    drawn_age: float
    distinct: int  # number of different trajectories that were drawn


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", default="tba-runs", help="root of the runs (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=FACTORS, default=list(FACTORS), metavar="FACTOR")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="SEED")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--hours", type=float, default=1000.0, help="start no replay after this many hours")
    parser.add_argument("--out", type=Path, default=Path("docs/results/ablations.csv"))
    parser.add_argument("--show", action="store_true", help="run nothing, show stored results")
    options = parser.parse_args(arguments)
    rows, ends = read(options.out, Row), time.monotonic() + 3600 * options.hours
    for replay in () if options.show else replays(options.only, options.seeds, options.steps):
        if any(replay == Replay(**{name: getattr(row, name) for name in asdict(replay)}) for row in rows):
            continue
        if time.monotonic() > ends:
            break
        rows.append(take(replay, options.root))
        append(options.out, rows[-1])
        print(rows[-1], flush=True)
    print("\n".join(markdown(rows)))
    for name, it in PICTURES.items():
        if drawn := by_value(rows, *it):
            options.out.with_name(f"{options.out.stem}-{name}.svg").write_text(drawn)


def replays(factors: Sequence[str], seeds: Sequence[int], steps: int) -> Iterator[Replay]:
    for seed in seeds:
        for factor in factors:
            for value in FACTORS[factor]:
                yield Replay(factor=factor, value=value, seed=seed, steps=steps)


def take(replay: Replay, root: str) -> Row:
    parent = f"ablations-{replay.steps}-{replay.seed}"
    if not finished(root, parent):
        tba("run", "quickstart", "--root", root, "--name", parent, "--steps", str(replay.steps), "--seed",
            str(replay.seed), changes={**PARENT, "training.decay_steps": replay.steps // 2})  # fmt: skip
    name = f"{parent}-{list(FACTORS).index(replay.factor)}-{replay.value or 'same'}"
    if not finished(root, name):
        tba("fork", run_url(root, parent), "--step", "0", "--replay", "--name", name,
            changes=FACTORS[replay.factor][replay.value])  # fmt: skip
    with storage.connect(run_url(root, name)) as con:
        scores = {m: con.execute(SCORE, {"metric": m}).fetchall()[0][0] for m in ("sampled", "greedy")}
        [(reward, age, distinct)] = con.execute(LEARNED).fetchall()
    return Row(**asdict(replay), **scores, drawn_reward=reward, drawn_age=age, distinct=distinct)


# --- tables and charts ------------------------------------------------------------------------------------------------


def markdown(rows: Sequence[Row]) -> Iterator[str]:
    yield "| | value | seeds | sampled | greedy | reward of what was drawn | its mean age |"
    yield "|---|---|---:|---:|---:|---:|---:|"
    for factor, values in FACTORS.items():
        for value in values:
            of = [row for row in rows if (row.factor, row.value) == (factor, value)]
            if of:
                names = ("sampled", "greedy", "drawn_reward", "drawn_age")
                cells = [spread([getattr(row, name) for row in of]) for name in names]
                yield f"| {factor} | {value} | {len(of)} | {' | '.join(cells)} |"


def by_value(rows: Sequence[Row], factor: str, place: Callable[[float], float]) -> str:
    """Return a chart of the results by value; empty if only one value has been measured."""
    of = {as_it_was(factor): [row for row in rows if row.factor == "as it was"]}
    of |= {float(it): [row for row in rows if (row.factor, row.value) == (factor, it)] for it in FACTORS[factor]}
    known = {place(value): of[value] for value in sorted(of) if of[value]}
    lines = {"sampled accuracy at the end": "sampled", "mean reward of what was drawn": "drawn_reward"}
    series = [
        line(name, {at: [getattr(row, column) for row in found] for at, found in known.items()})
        for name, column in lines.items()
    ]
    symbol = factor.partition(",")[0]
    return (
        Chart(factor, series, x_name=symbol if place is float else f"log2 {symbol}").picture() if len(known) > 1 else ""
    )


def as_it_was(factor: str) -> float:
    """Return the preset's value of the first setting that a factor changes."""
    section, name = next(iter(next(iter(FACTORS[factor].values())))).split(".")
    return float(getattr(getattr(preset("quickstart"), section), name))


if __name__ == "__main__":
    main()
