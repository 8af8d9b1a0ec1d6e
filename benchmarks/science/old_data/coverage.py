"""Measure what 1, 2 and 4 searchers find in the same time, on a task whose right answers are rare and all known.

    python -m benchmarks.science.old_data.coverage [ROOT] [--only 1 4 …] [--seeds 0 …] [--minutes M] [--hours H]
    python -m benchmarks.science.old_data.coverage --show        only show the table of stored results

The task is `RareAnswers`. Each run is a `tba run` on a local disk, which is stopped when `--minutes` have passed since
its first shard. Only the number of searchers changes. A round of a searcher generates 2,048 responses and waits 4
seconds (benchmarks/science/paced.py), as if they were generated elsewhere. So searchers leave one of two cores to the
trainer, which never waits: in the same time it takes about as many steps with any number of searchers.

Coverage is the share of all right answers to the 32 training prompts that were generated at least once. The last
version within the time is examined on held-out prompts, exactly: the probability of a right answer, the total variation
to the exact target, and the mean log-probability of right answers that are drawn from the target.

Each run is a row of the CSV and is not repeated, so the command continues where it stopped. Runs are kept under ROOT,
without their weights.
"""

import argparse
import math
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

import storage
from benchmarks.harness.rows import append, read, spread
from benchmarks.science.old_data.exact import PROBLEMS, measures, right_logps
from benchmarks.science.old_data.many_answers import sums
from benchmarks.science.old_data.rare_answers import TRAIN_PROMPTS, RareAnswers
from benchmarks.science.runs import forget_weights, tba, tba_command
from storage.layout import run_url
from storage.runs.run import Run
from storage.weights.versions import Versions
from tba.config import TaskConfig
from tba.models.policy import Policy
from tba.types import Version

COUNTS, SEEDS, MINUTES, BETA = (1, 2, 4), (0, 1, 2), 10.0, 0.05
FIRST = (1, 10, 100)
TASK = "benchmarks.science.paced:PacedRareAnswers"
BASE: Mapping[str, Any] = {
    "task.options.latency": 4.0,
    "objective.beta_start": BETA,
    "objective.beta_end": BETA,
    "search.prompts_per_round": 32,
    "search.responses_per_prompt": 64,
    "search.initial_fill": 2048,
    "sampling.inv_temp": 10.0,  # a right answer that is in the buffer is drawn whenever its prompt is
    "sampling.capacity": 256,
    "sampling.evict": "worst",
    "training.prompts_per_step": 16,
    "training.groups_per_micro_batch": 16,
    "training.decay_steps": 1,  # the time ends the run, not its steps
    "sync.keep_versions": 10**6,
    "evaluation.every": 10**6,
    "model.threads": 1,
    "limits.silent_after": 60,
}
STEPS = 10**6
FIRST_SHARD = "select min(created_at) from trajectories"
FOUND = """
select min(created_at) as moment from trajectories
where reward = 1 and created_at <= $ends group by prompt_id, response order by moment
"""
GENERATED = "select count(*) from trajectories where created_at <= $ends"
TAKEN = "select count(*) from steps where created_at <= $moment"
NEWEST = "select version, attempt from versions where created_at <= $ends order by created_at desc limit 1"


@dataclass(frozen=True, kw_only=True)
class Trial:
    searchers: int
    seed: int
    minutes: float


@dataclass(frozen=True, kw_only=True)
class Row(Trial):
    base_right: float  # probability of a right answer on held-out prompts, of the base policy
    ideal_right: float  # of the exact target
    generated: int
    steps: int
    found: int  # number of different right answers to training prompts that were generated
    known: int
    to_1: float  # steps until the first of them was generated, or infinity
    to_10: float
    to_100: float
    right: float  # of the last version, like the next two
    total_variation: float
    log_probability: float


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", default="tba-runs", help="root of the runs (default: %(default)s)")
    parser.add_argument("--only", nargs="+", type=int, default=COUNTS, metavar="COUNT")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, metavar="SEED")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="length of a run")
    parser.add_argument("--hours", type=float, default=1000.0, help="start no run after this many hours")
    parser.add_argument("--out", type=Path, default=Path("docs/results/coverage.csv"))
    parser.add_argument("--show", action="store_true", help="run nothing, show stored results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    rows, ends = read(options.out, Row), time.monotonic() + 3600 * options.hours
    for seed, count in () if options.show else product(options.seeds, options.only):
        trial = Trial(searchers=count, seed=seed, minutes=options.minutes)
        if any(trial == Trial(**{name: getattr(row, name) for name in asdict(trial)}) for row in rows):
            continue
        if time.monotonic() > ends:
            break
        rows.append(take(trial, options.root))
        append(options.out, rows[-1])
        print(rows[-1], flush=True)
    print("\n".join(markdown([row for row in rows if row.minutes == options.minutes])))


# --- runs -------------------------------------------------------------------------------------------------------------


def take(trial: Trial, root: str) -> Row:
    url = run_url(root, f"coverage-{trial.minutes:g}-{trial.seed}-{trial.searchers}")
    shutil.rmtree(url, ignore_errors=True)  # an interrupted run: its clock went on
    ends = run_for(trial, root, url)
    run = Run.open(url)
    with storage.connect(url) as con:
        moments = [moment for (moment,) in con.execute(FOUND, {"ends": ends}).fetchall()]
        reached = {k: moments[k - 1] if len(moments) >= k else None for k in FIRST}
        [(generated,)] = con.execute(GENERATED, {"ends": ends}).fetchall()
        [(number, attempt)] = con.execute(NEWEST, {"ends": ends}).fetchall()
        steps = {
            k: float(con.execute(TAKEN, {"moment": moment}).fetchall()[0][0]) if moment else math.inf
            for k, moment in {**reached, 0: ends}.items()
        }
    base, ideal, found = examined(run, Version(number, attempt))
    row = Row(
        **asdict(trial),
        base_right=float(f"{base:.3g}"),
        ideal_right=round(ideal, 4),
        generated=generated,
        steps=int(steps[0]),
        found=len(moments),
        known=len(known()),
        to_1=steps[1],
        to_10=steps[10],
        to_100=steps[100],
        right=round(found["right"], 4),
        total_variation=round(found["total_variation"], 4),
        log_probability=round(found["log_probability"], 3),
    )
    forget_weights(url)
    return row


def run_for(trial: Trial, root: str, url: str) -> datetime:
    """Run until the time has passed, then stop the run. Return the end of the time."""
    command = tba_command(
        "run", TASK, "--root", root, "--name", url.rpartition("/")[2], "--steps", str(STEPS), "--seed", str(trial.seed),
        "--searchers", str(trial.searchers), changes=BASE,
    )  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        began = None
        while process.poll() is None:
            time.sleep(1)
            began = began or _first_shard(url)
            if began and datetime.now(UTC).replace(tzinfo=None) >= began + timedelta(minutes=trial.minutes):
                tba("stop", url)
                return began + timedelta(minutes=trial.minutes)
    raise RuntimeError(f"{url}: the run ended before its {trial.minutes:g} minutes: `tba runs` says why")


def _first_shard(url: str) -> datetime | None:
    """Return when the first shard was made, as storage says it: in UTC, without a time zone. None if there is none."""
    if not (Path(url) / "run.json").exists():
        return None
    with storage.connect(url) as con:
        return con.execute(FIRST_SHARD).fetchall()[0][0]


def known() -> list[tuple[int, str]]:
    """Return all right answers to training prompts, each with the sum that its prompt asks for."""
    task = RareAnswers(TaskConfig(name=TASK))
    return [(total, answer) for total in sums("train")[:TRAIN_PROMPTS] for answer in task.right_answers(total)]


def examined(run: Run, version: Version) -> tuple[float, float, Mapping[str, float]]:
    """Return the probability of a right answer to held-out prompts, of the base policy and of the exact target, and the
    measures of a version."""
    versions, task = Versions(run), RareAnswers(TaskConfig(name=TASK))
    start = versions.reference()
    if start is None:
        raise RuntimeError(f"{run.url}: the base policy is not stored any more")
    policy = Policy.load(versions.load(start))
    prompts = task.prompts("test", [], policy.tokenizer, max_tokens=16)[: PROBLEMS[task.name]]
    answers = [task.right_answers(int(it.answer)) for it in prompts]
    ref_logps = right_logps(policy, prompts, answers)
    at_start = measures(ref_logps, ref_logps, BETA)
    found = measures(right_logps(Policy.load(versions.load(version)), prompts, answers), ref_logps, BETA)
    return at_start["right"], at_start["right"] + at_start["total_variation"], found


# --- table ------------------------------------------------------------------------------------------------------------

COLUMNS: Mapping[str, tuple[Callable[[Row], float], int]] = {
    "generated": (lambda row: row.generated, 0),
    "steps": (lambda row: row.steps, 0),
    "coverage": (lambda row: row.found / row.known, 3),
    "steps to 1": (lambda row: row.to_1, 0),
    "steps to 10": (lambda row: row.to_10, 0),
    "steps to 100": (lambda row: row.to_100, 0),
    "right": (lambda row: row.right, 3),
    "total variation": (lambda row: row.total_variation, 3),
    "log-probability": (lambda row: row.log_probability, 2),
}


def markdown(rows: Sequence[Row]) -> Iterator[str]:
    yield f"| searchers | seeds | {' | '.join(COLUMNS)} |"
    yield "|" + "---:|" * (2 + len(COLUMNS))
    for count in sorted({row.searchers for row in rows}):
        of = [row for row in rows if row.searchers == count]
        cells = [_shown([value(row) for row in of], digits) for value, digits in COLUMNS.values()]
        yield f"| {count} | {len(of)} | {' | '.join(cells)} |"


def _shown(values: Sequence[float], digits: int) -> str:
    """Return mean and standard error. If a seed did not get there, say how many did instead."""
    there = [it for it in values if math.isfinite(it)]
    return spread(values, digits) if len(there) == len(values) else f"{len(there)} of {len(values)} seeds"


if __name__ == "__main__":
    main()
