"""The engine of the races `speed` and `laptop`: several ways to train the same policy, and the seconds that each takes
to a stated held-out accuracy.

The clock of a run starts when a searcher first adopts weights, or when TRL's `train` begins: imports and loading do not
count. It stops when the version that reaches the goal has been published; between two scored versions, accuracy is
taken as a straight line. Scoring does not count either: TRL's clock stands still meanwhile, and our versions are scored
after the run, on the same prompts and with the same generator as TRL's. A paced searcher also sleeps for a fixed time
in each round, like a searcher that waits for an engine elsewhere; so does TRL's paced arm for each batch of rewards.

The learning rate of each arm is chosen by the steps to the goal, on one seed that is not reported. The same first
rates are tried for every arm; while the best rate of an arm is the lowest or the highest that was tried, the rate
beyond it is tried too. A run of this choice ends where another rate was already at the goal. Where an arm may have one
or two threads, these are then chosen by the seconds to the goal, on the same seed.

Each run is a row of a CSV and is not repeated. Timings need a machine without other load.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from transformers.utils import logging

import storage
from benchmarks.harness.memory import measured
from benchmarks.harness.rows import append, read, spread
from benchmarks.science.lagged import make_scores
from benchmarks.science.runs import finished_in_one_go, forget_weights, tba_command
from storage.layout import run_url
from storage.runs.run import Run as StoredRun
from storage.weights.versions import Versions
from tba.config import Config
from tba.presets import preset
from tba.types import Version

SEEDS, TUNING_SEED = (0, 1, 2), 100


@dataclass(frozen=True, kw_only=True)
class Arm:
    settings: Mapping[str, Any] = field(default_factory=dict)
    task: str = ""  # the task that is run, if it is not the race's preset
    trl: str = ""  # TRL's trainer, for an arm of TRL: grpo, rloo or online-dpo
    latency: float = 0.0  # seconds that each batch of rewards of a TRL arm waits
    threads: Sequence[str] = ("1",)  # to choose from
    steps: int  # maximum
    rates_of: str = ""  # the arm whose learning rate and threads this arm takes, if not its own
    other_threads: str = ""  # instead of those of `rates_of`


@dataclass(frozen=True, kw_only=True)
class Race:
    preset: str
    arms: Mapping[str, Arm]
    common: Mapping[str, Any]  # settings of all our arms
    scoring: Mapping[str, Any]  # settings with which versions are scored
    trl: Mapping[str, Any]  # options of all arms of TRL, as `race_trl` takes them
    rates: Sequence[float]  # tried for every arm, the likeliest first
    further_rates: Sequence[float]  # lower and higher ones, for arms whose best rate is at an end of those tried
    goal: float
    scored_every: int  # steps
    results: Path
    keeps_weights: bool = True  # after a run of ours has been scored

    def config(self, seed: int) -> Config:
        return preset(self.preset).replace({"seed": seed, **self.scoring})


@dataclass(frozen=True, kw_only=True)
class Run:
    """The identity of a run: the first columns of its row of the CSV."""

    arm: str
    seed: int
    rate: float
    threads: str
    goal: float


@dataclass(frozen=True, kw_only=True)
class Row(Run):
    seconds: float  # seconds to the goal; infinite if the run did not reach it, like `steps`
    steps: float
    seconds_per_step: float
    reached: float  # accuracy when the run ended
    generated_per_second: float  # tokens of responses per second of generating; NaN if not measured, like the next two
    learned_per_second: float  # tokens of responses per second of the trainer's own work
    memory_gb: float  # largest sum over all processes at one time
    curve: str  # step:seconds:accuracy

    @property
    def key(self) -> Run:
        return Run(**{name: getattr(self, name) for name in Run.__dataclass_fields__})


def main(race: Race, description: str | None, arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", default="tba-runs", help="root of the runs (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=race.arms, default=list(race.arms), metavar="ARM")
    parser.add_argument(
        "--seeds", nargs="*", type=int, default=SEEDS, metavar="SEED", help="if none: only choose rates and threads"
    )
    parser.add_argument("--goal", type=float, default=race.goal)
    parser.add_argument("--trl", type=Path, help="folder with TRL")
    parser.add_argument("--hours", type=float, default=1000.0, help="start no run after this many hours")
    parser.add_argument("--out", type=Path, default=race.results)
    parser.add_argument("--show", action="store_true", help="run nothing, show stored results")
    options = parser.parse_args(arguments)
    logging.disable_progress_bar()
    rows, ends = read(options.out, Row), time.monotonic() + 3600 * (0 if options.show else options.hours)
    while time.monotonic() < ends and (run := next_run(race, rows, options.only, options.seeds, options.goal)):
        rows.append(take(race, run, most_steps(race, rows, run), options.root, options.trl))
        append(options.out, rows[-1])
        print(rows[-1], flush=True)
    print("\n".join(markdown(race, rows, options.goal)))


# --- which run comes next ---------------------------------------------------------------------------------------------


def next_run(race: Race, rows: Sequence[Row], names: Sequence[str], seeds: Sequence[int], goal: float) -> Run | None:
    """Return the first run that has no row: choices of learning rates, then of threads, then the reported seeds."""
    done = {row.key for row in rows}
    tuning = chain(
        *(rates(race, rows, name, goal) for name in names), *(threads(race, rows, name, goal) for name in names)
    )  # fmt: skip
    for run in tuning:
        if run not in done:
            return run
    for seed in seeds:
        for name in names:
            if (run := best(race, rows, name, seed, goal)) not in done:
                return run
    return None


def rates(race: Race, rows: Sequence[Row], name: str, goal: float) -> list[Run]:
    """Return the runs that choose the learning rate, as far as they are known."""
    of = race.arms[name].rates_of or name

    def run(rate: float) -> Run:
        return Run(arm=of, seed=TUNING_SEED, rate=rate, threads=race.arms[of].threads[0], goal=goal)

    asked, found = list(race.rates), {row.key: row for row in rows}
    while all(run(rate) in found for rate in asked):
        beyond = [it for it in race.further_rates if not min(asked) < it < max(asked) and it not in asked]
        rate = by_steps(found[run(it)] for it in asked).rate
        if rate == min(asked):
            following = max((it for it in beyond if it < rate), default=None)
        elif rate == max(asked):
            following = min((it for it in beyond if it > rate), default=None)
        else:
            following = None
        if following is None:
            break
        asked.append(following)
    return [run(rate) for rate in asked]


def by_steps(rows: Iterable[Row]) -> Row:
    """Return the row that needed the fewest steps. Of rows that did not reach the goal, the one that came closest."""
    return min(rows, key=lambda row: (row.steps, -row.reached, row.rate))


def threads(race: Race, rows: Sequence[Row], name: str, goal: float) -> list[Run]:
    """Return the runs that choose the threads, at the best rate. Empty until that rate is known."""
    asked = rates(race, rows, name, goal)
    tried = [row for row in rows if row.key in asked]
    if len(tried) < len(asked):
        return []
    rate, of = by_steps(tried).rate, race.arms[name].rates_of or name
    return [Run(arm=of, seed=TUNING_SEED, rate=rate, threads=it, goal=goal) for it in race.arms[of].threads]


def best(race: Race, rows: Sequence[Row], name: str, seed: int, goal: float) -> Run:
    tried = [row for row in rows if row.key in threads(race, rows, name, goal)]
    chosen = min(tried, key=lambda row: (row.seconds, row.seconds_per_step))
    own = race.arms[name].other_threads or chosen.threads
    return Run(arm=name, seed=seed, rate=chosen.rate, threads=own, goal=goal)


def most_steps(race: Race, rows: Sequence[Row], run: Run) -> int:
    """Return the steps after which this run is of no more use: all those of its arm, or those to the goal at the best
    other rate that was tried, up to the next scored step."""
    arm = race.arms[run.arm]
    if run.seed != TUNING_SEED or run.threads != arm.threads[0]:
        return arm.steps
    tried = [row.steps for row in rows if row.key in rates(race, rows, run.arm, run.goal)]
    needed = min([float(arm.steps), *tried])
    return math.ceil(needed / race.scored_every) * race.scored_every


# --- runs -------------------------------------------------------------------------------------------------------------


Curve = Sequence[tuple[int, float, float]]  # steps, seconds, sampled accuracy


@dataclass(frozen=True, kw_only=True)
class Taken:
    """The learning curve of a run, its speeds and its memory."""

    curve: Curve
    generated_per_second: float
    learned_per_second: float
    memory_gb: float


def take(race: Race, run: Run, steps: int, root: str, trl: Path | None) -> Row:
    taken = run_trl(race, run, steps, trl) if race.arms[run.arm].trl else run_ours(race, run, steps, root)
    seconds, needed = reached(taken.curve, run.goal)
    last = taken.curve[-1]
    return Row(
        **asdict(run),
        seconds=round(seconds, 2),
        steps=round(needed, 1),
        seconds_per_step=round(last[1] / last[0], 4),
        reached=round(last[2], 4),
        generated_per_second=round(taken.generated_per_second, 1),
        learned_per_second=round(taken.learned_per_second, 1),
        memory_gb=round(taken.memory_gb, 2),
        curve=" ".join(f"{step}:{seconds:.2f}:{score:.4f}" for step, seconds, score in taken.curve),
    )


def reached(curve: Curve, goal: float) -> tuple[float, float]:
    """Return the seconds and steps to the goal, interpolated linearly between scored points; infinite if the goal is
    not reached."""
    for (step, seconds, score), (later, until, better) in pairwise(curve):
        if better >= goal:
            share = (goal - score) / (better - score)
            return seconds + share * (until - seconds), step + share * (later - step)
    return float("inf"), float("inf")


def run_trl(race: Race, run: Run, steps: int, folder: Path | None) -> Taken:
    if folder is None:
        raise SystemExit(f"{run.arm} needs --trl, a folder with TRL: see --help")
    arm = race.arms[run.arm]
    asked = {
        **race.trl,
        "trainer": arm.trl,
        "latency": arm.latency,
        "preset": race.preset,
        "scoring": race.scoring,
        "steps": steps,
        "scored_every": race.scored_every,
        **{name: getattr(run, name) for name in ("seed", "rate", "goal")},
        "threads": int(run.threads),
    }
    command = [sys.executable, "-m", "benchmarks.science.race_trl", json.dumps(asked)]
    paths = [str(folder), os.getcwd(), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": run.threads}
    printed, memory = measured(command, environment)
    told = json.loads(printed.splitlines()[-1])
    return Taken(**{**told, "curve": [tuple(point) for point in told["curve"]]}, memory_gb=memory)


SPEEDS = """
select (select sum(length) / sum(generate_seconds) from trajectories),
    (select sum(length) from draws join trajectories using (trajectory_id))
        / (select sum(seconds_step - seconds_wait) from steps)
"""


def run_ours(race: Race, run: Run, steps: int, root: str) -> Taken:
    arm = race.arms[run.arm]
    name = f"race-{sha256(run.arm.encode()).hexdigest()[:8]}-{run.seed}-{run.rate:g}-{run.threads}-{steps}"
    settings = {**race.common, "training.learning_rate": run.rate, "model.threads": run.threads, **arm.settings}
    memory = math.nan
    if not finished_in_one_go(root, name):
        arguments = ("--root", root, "--name", name, "--steps", str(steps), "--seed", str(run.seed))
        _, memory = measured(tba_command("run", arm.task or race.preset, *arguments, changes=settings))
    url = run_url(root, name)
    with storage.connect(url) as con:
        [(began,)] = con.execute("select min(created_at) from events where kind = 'version-adopted'").fetchall()
        published = con.execute("select version, attempt, step, created_at from versions order by step").fetchall()
        [(generated, learned)] = con.execute(SPEEDS).fetchall()
    score, versions = make_scores(race.config(run.seed)), Versions(StoredRun.open(url))
    curve: list[tuple[int, float, float]] = []
    for number, attempt, step, at in published:
        if step % race.scored_every == 0:
            curve.append((step, (at - began).total_seconds() if step else 0.0,
                          score(versions.load(Version(number, attempt)))["sampled"]))  # fmt: skip
            if curve[-1][2] >= run.goal:
                break
    if not race.keeps_weights:
        forget_weights(url)
    return Taken(curve=curve, generated_per_second=generated, learned_per_second=learned, memory_gb=memory)


# --- tables -----------------------------------------------------------------------------------------------------------


def markdown(race: Race, rows: Sequence[Row], goal: float) -> Iterator[str]:
    columns = {
        f"seconds to {goal:g}": "seconds", "steps to it": "steps", "seconds per step": "seconds_per_step",
        "generated tokens / s": "generated_per_second", "learned tokens / s": "learned_per_second",
        "memory, GB": "memory_gb",
    }  # fmt: skip
    yield f"| arm | learning rate | threads | {' | '.join(columns)} | seeds |"
    yield "|---|---:|---:|" + "---:|" * len(columns) + "---:|"
    for name in race.arms:
        if of := reported(race, rows, name, goal):
            there = [row for row in of if math.isfinite(row.steps)]
            values = {
                it: [value for row in there if not math.isnan(value := getattr(row, it))] for it in columns.values()
            }
            cells = [spread(them) for them in values.values()]
            rate = f"{of[0].rate:g}" if threads(race, rows, name, goal) else f"{of[0].rate:g}, search not ended"
            yield f"| {name} | {rate} | {of[0].threads} | {' | '.join(cells)} | {len(there)} of {len(of)} |"
    yield ""
    tried = sorted({row.rate for row in rows if row.seed == TUNING_SEED and row.goal == goal})
    yield "| on the tuning seed | threads | " + " | ".join(f"{rate:g}" for rate in tried) + " |"
    yield "|---|---:|" + "---:|" * len(tried)
    for name in race.arms:
        of = [row for row in rows if row.arm == name and row.seed == TUNING_SEED and row.goal == goal]
        for count in sorted({row.threads for row in of}):
            timed = len(race.arms[name].threads) > 1
            cells = {row.rate: said(row, timed=timed) for row in of if row.threads == count}
            yield f"| {name} | {count} | " + " | ".join(cells.get(rate, "") for rate in tried) + " |"


def reported(race: Race, rows: Sequence[Row], name: str, goal: float) -> list[Row]:
    """Return the rows of an arm on the reported seeds: those with its chosen rate and threads, or all of them if the
    search for these has not ended."""
    of = [row for row in rows if row.arm == name and row.seed != TUNING_SEED and row.goal == goal]
    asked = threads(race, rows, name, goal)
    if not asked or any(run not in {row.key for row in rows} for run in asked):
        return of
    return [row for row in of if row.key == best(race, rows, name, row.seed, goal)]


def said(row: Row, *, timed: bool) -> str:
    if not math.isfinite(row.steps):
        return f"{row.reached:.2f}"
    return f"{row.steps:.0f} steps, {row.seconds:.0f} s" if timed else f"{row.steps:.0f} steps"
