"""Compare the wall-clock time to 0.90 accuracy on the quickstart task: asynchronous, synchronous and TRL's trainers.

    python -m benchmarks.science.speed ROOT [--only ARM …] [--seeds 0 …] [--goal 0.9] [--trl FOLDER] [--out FILE.csv]
    python -m benchmarks.science.speed --show            only show the table of stored results

TRL and its dependencies are not among our requirements. --trl names a folder into which they were installed by

    pip install --no-deps --target FOLDER -r benchmarks/science/requirements-trl.txt

Our arms are asynchronous (no role waits for another), one version behind (`sync.lag` = 1: searchers generate with the
version before the newest while the trainer learns), and synchronous (`sync.lag` = 0). "Anchored" is trajectory balance
with `objective.anchor=behaviour` and beta 0.25; all other arms have the preset's beta of 0.05. All arms have the same
base policies, prompts, rewards, cores and 256 responses per step: 8 to each of 32 prompts, or 2 to each of 128 for
methods that compare pairs. All arms use AdamW (0.9, 0.999), a warm-up of 10 steps and then a constant learning rate.
TRL's trainers keep their other defaults, except memory and precision settings that would cost them time here. The
learning rate of each arm is chosen from `RATES` by the steps to the goal, on one seed that is not reported. Where only
one role works at a time, more threads could help, so one or two threads are then chosen by the seconds to the goal.

The clock of a run starts when a searcher first adopts weights, or when TRL's `train` begins: imports and loading do not
count. It stops when the version that reaches the goal has been published; between two scored versions, accuracy is
taken as a straight line. Scoring does not count either: TRL's clock stands still meanwhile, and our versions are scored
after the run. A paced searcher also sleeps for a fixed time in each round, like a searcher that waits for an engine
elsewhere.

Each run is a row of the CSV and is not repeated. Timings need a machine without other load.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from transformers.utils import logging

import storage
from benchmarks.science.ablations import finished, tba
from benchmarks.science.lagged import make_scores
from benchmarks.science.rows import append, read, spread
from storage.layout import run_url
from storage.runs.run import Run as StoredRun
from storage.weights.versions import Versions
from tba.presets import preset
from tba.types import Version

SEEDS, TUNING_SEED, RATES, GOAL = (0, 1, 2), 100, (3e-4, 6e-4, 1.2e-3), 0.9
SCORED_EVERY = 8

COMMON: Mapping[str, Any] = {
    "training.schedule": "warmup-stable-decay",
    "training.decay_steps": 0,
    "training.adam_beta1": 0.9,
    "search.prompts_per_round": 32,
    "search.initial_fill": 256,
    "sampling.copies": "all",
    "sync.keep_versions": 1000,
    "evaluation.prompts": 1,
}
IN_STEP: Mapping[str, Any] = {"sync.lag": 0, "sync.every": 1, "sampling.recent_share": 1.0}
ANCHORED: Mapping[str, Any] = {
    "objective.anchor": "behaviour", "objective.beta_start": 0.25, "objective.beta_end": 0.25
}  # fmt: skip
PACE: Mapping[str, Any] = {"task.options.latency": 1.5}  # seconds
PACED = "benchmarks.science.paced:PacedQuickstart"


@dataclass(frozen=True)
class Arm:
    settings: Mapping[str, Any] = field(default_factory=dict)
    task: str = "quickstart"
    threads: Sequence[int] = (1,)
    steps: int = 160  # maximum
    rates_of: str = ""  # the arm whose learning rate and threads this arm takes, if not its own


ARMS: Mapping[str, Arm] = {
    "asynchronous TB, anchored": Arm(ANCHORED, steps=320),
    "asynchronous TBA'": Arm({"objective.name": "tba-prime"}, steps=320),
    "asynchronous TB": Arm(steps=320),
    "one version behind, TBA'": Arm({"objective.name": "tba-prime", **IN_STEP, "sync.lag": 1}),
    "synchronous TB": Arm(IN_STEP, threads=(1, 2), steps=96),
    "TRL's GRPO": Arm(threads=(1, 2)),
    "TRL's RLOO": Arm(threads=(1, 2)),
    "TRL's online DPO": Arm(threads=(1, 2)),
    "synchronous TB, a paced searcher": Arm({**IN_STEP, **PACE}, PACED, steps=96, rates_of="synchronous TB"),
    "synchronous TB, 3 paced searchers": Arm(
        {**IN_STEP, **PACE, "search.searchers": 3, "search.prompts_per_round": 11},
        PACED,
        steps=96,
        rates_of="synchronous TB",
    ),
    "asynchronous TB, anchored, 3 paced searchers": Arm(
        {**ANCHORED, **PACE, "search.searchers": 3}, PACED, steps=320, rates_of="asynchronous TB, anchored"
    ),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """The identity of a run: the first columns of its row of the CSV."""

    arm: str
    seed: int
    rate: float
    threads: int
    goal: float


@dataclass(frozen=True, kw_only=True)
class Row(Run):
    seconds: float  # seconds to the goal; infinite if the run did not reach it, like `steps`
    steps: float
    seconds_per_step: float
    reached: float  # accuracy when the run ended
    curve: str  # step:seconds:accuracy

    @property
    def key(self) -> Run:
        return Run(**{name: getattr(self, name) for name in Run.__dataclass_fields__})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", default="tba-runs", help="root of the runs (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    parser.add_argument(
        "--seeds", nargs="*", type=int, default=SEEDS, metavar="SEED", help="if none: only choose rates and threads"
    )
    parser.add_argument("--goal", type=float, default=GOAL)
    parser.add_argument("--trl", type=Path, help="folder with TRL")
    parser.add_argument("--out", type=Path, default=Path("docs/results/speed.csv"))
    parser.add_argument("--show", action="store_true", help="run nothing, show stored results")
    options = parser.parse_args(arguments)
    logging.disable_progress_bar()
    rows = read(options.out, Row)
    while not options.show and (run := next_run(rows, options.only, options.seeds, options.goal)):
        rows.append(take(run, options.root, options.trl))
        append(options.out, rows[-1])
        print(rows[-1], flush=True)
    print("\n".join(markdown(rows, options.goal)))


# --- runs -------------------------------------------------------------------------------------------------------------


def next_run(rows: Sequence[Row], names: Sequence[str], seeds: Sequence[int], goal: float) -> Run | None:
    """Return the first run that has no row: choices of learning rates, then of threads, then the reported seeds."""
    done = {row.key for row in rows}
    for run in chain(*(rates(name, goal) for name in names), *(threads(rows, name, goal) for name in names)):
        if run not in done:
            return run
    for seed in seeds:
        for name in names:
            if (run := best(rows, name, seed, goal)) not in done:
                return run
    return None


def rates(name: str, goal: float) -> list[Run]:
    of = ARMS[name].rates_of or name
    return [Run(arm=of, seed=TUNING_SEED, rate=rate, threads=1, goal=goal) for rate in RATES]


def threads(rows: Sequence[Row], name: str, goal: float) -> list[Run]:
    """Return the runs that choose the threads, at the best rate. Empty until that rate is known."""
    tried = [row for row in rows if row.key in rates(name, goal)]
    if len(tried) < len(RATES):
        return []
    rate = min(tried, key=lambda row: (row.steps, -row.reached, row.rate)).rate
    of = ARMS[name].rates_of or name
    return [Run(arm=of, seed=TUNING_SEED, rate=rate, threads=it, goal=goal) for it in ARMS[of].threads]


def best(rows: Sequence[Row], name: str, seed: int, goal: float) -> Run:
    tried = [row for row in rows if row.key in threads(rows, name, goal)]
    chosen = min(tried, key=lambda row: (row.seconds, row.seconds_per_step))
    return Run(arm=name, seed=seed, rate=chosen.rate, threads=chosen.threads, goal=goal)


def take(run: Run, root: str, trl: Path | None) -> Row:
    curve = by_trl(run, trl) if run.arm.startswith("TRL") else by_us(run, root)
    seconds, steps = reached(curve, run.goal)
    return Row(
        **asdict(run),
        seconds=round(seconds, 2),
        steps=round(steps, 1),
        seconds_per_step=round(curve[-1][1] / curve[-1][0], 4),
        reached=round(curve[-1][2], 4),
        curve=" ".join(f"{step}:{seconds:.2f}:{score:.4f}" for step, seconds, score in curve),
    )


Curve = Sequence[tuple[int, float, float]]  # steps, seconds, sampled accuracy


def reached(curve: Curve, goal: float) -> tuple[float, float]:
    """Return the seconds and steps to the goal, interpolated linearly between scored points; infinite if the goal is
    not reached."""
    for (step, seconds, score), (later, until, better) in pairwise(curve):
        if better >= goal:
            share = (goal - score) / (better - score)
            return seconds + share * (until - seconds), step + share * (later - step)
    return float("inf"), float("inf")


def by_trl(run: Run, folder: Path | None) -> Curve:
    if folder is None:
        raise SystemExit(f"{run.arm} needs --trl, a folder with TRL: see --help")
    asked = {**asdict(run), "steps": ARMS[run.arm].steps, "scored_every": SCORED_EVERY}
    command = [sys.executable, "-m", "benchmarks.science.speed_trl", json.dumps(asked)]
    paths = [str(folder), os.getcwd(), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(run.threads)}
    told = subprocess.run(command, capture_output=True, text=True, env=environment)
    if told.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with exit code {told.returncode}:\n{told.stderr[-2000:]}")
    return [tuple(point) for point in json.loads(told.stdout.splitlines()[-1])]


def by_us(run: Run, root: str) -> Curve:
    arm = ARMS[run.arm]
    name = f"speed-{sha256(run.arm.encode()).hexdigest()[:8]}-{run.seed}-{run.rate:g}-{run.threads}-{arm.steps}"
    settings = {**COMMON, "training.learning_rate": run.rate, "model.threads": run.threads, **arm.settings}
    if not finished(root, name):
        tba("run", arm.task, "--root", root, "--name", name, "--steps", str(arm.steps), "--seed", str(run.seed),
            changes=settings)  # fmt: skip
    url = run_url(root, name)
    with storage.connect(url) as con:
        [(began,)] = con.execute("select min(created_at) from events where kind = 'version-adopted'").fetchall()
        published = con.execute("select version, attempt, step, created_at from versions order by step").fetchall()
    score, versions = make_scores(preset("quickstart").replace({"seed": run.seed})), Versions(StoredRun.open(url))
    curve: list[tuple[int, float, float]] = []
    for number, attempt, step, at in published:
        if step % SCORED_EVERY == 0:
            curve.append((step, (at - began).total_seconds() if step else 0.0,
                          score(versions.load(Version(number, attempt)))))  # fmt: skip
            if curve[-1][2] >= run.goal:
                break
    return curve


# --- tables -----------------------------------------------------------------------------------------------------------


def markdown(rows: Sequence[Row], goal: float) -> Iterator[str]:
    yield f"| arm | learning rate | threads | seconds to {goal:g} | steps to it | seconds per step | seeds |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for name in ARMS:
        of = [row for row in rows if row.arm == name and row.seed != TUNING_SEED and row.goal == goal]
        if of:
            there = [row for row in of if math.isfinite(row.steps)]
            cells = [spread([getattr(row, it) for row in there]) for it in ("seconds", "steps", "seconds_per_step")]
            yield f"| {name} | {of[0].rate:g} | {of[0].threads} | {' | '.join(cells)} | {len(there)} of {len(of)} |"
    yield ""
    yield "| on the tuning seed | threads | " + " | ".join(f"{rate:g}" for rate in RATES) + " |"
    yield "|---|---:|" + "---:|" * len(RATES)
    for name in ARMS:
        of = [row for row in rows if row.arm == name and row.seed == TUNING_SEED and row.goal == goal]
        for threads in sorted({row.threads for row in of}):
            tried = {row.rate: said(row) for row in of if row.threads == threads}
            yield f"| {name} | {threads} | " + " | ".join(tried.get(rate, "") for rate in RATES) + " |"


def said(row: Row) -> str:
    return f"{row.steps:.0f} steps, {row.seconds:.0f} s" if math.isfinite(row.steps) else f"{row.reached:.2f}"


if __name__ == "__main__":
    main()
