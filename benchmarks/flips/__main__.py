"""Damage one byte of a stored run at a time: does `tba check` name the object, or do all answers stay the same?

    python -m benchmarks.flips [--flips 2000] [--seed 0] [--store local|s3] [--run FOLDER …] [--out FOLDER]

Each flip changes one byte of one object: a single bit, the whole byte, or, in JSON, a digit or letter into another one.
Flips are spread evenly over the kinds of objects, and inside Parquet objects evenly over their parts. After each flip,
`tba check` checks the run. If it finds nothing, all answers of the run are computed again: all rows of all views,
settings, state, leases, attempts, forks, what was given up, the files of every version and checkpoint, and the draws of
a replay buffer after each record. Then the byte is restored. The verdicts:

    named             the check, or opening the run, names the object or the folder of its manifest
    named by another  the check names only another object, which contradicts the damaged one
    harmless          the check finds nothing and every answer is the same
    changed           the check finds nothing, and an answer differs or is an error: this is a finding
    crashed           an exception other than our errors and DuckDB's, or a process died: a finding too

`--also-removals` also removes, halves and doubles objects, and counts these separately. The runs are those of
`benchmarks/flips/small_run.py`, or each `--run FOLDER`; a fork also needs the FOLDER of its parent. Each process works
on a copy. `--store s3` is Ceph's gateway if it is installed, else a simulation of S3. `--out` stores all findings as
`flips.json`. The exit status is 1 if there is a finding.
"""

import argparse
import faulthandler
import json
import logging
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.flips.damage import Damage, plan_damage
from benchmarks.flips.judging import FINDINGS, VERDICTS, Judged, Subject
from benchmarks.flips.small_run import copy_runs, make_runs
from benchmarks.harness import servers
from benchmarks.harness.hardware import hardware
from storage import layout

LONGEST = 300.0  # seconds for one flip; a process that takes longer is killed


# --- worker processes -------------------------------------------------------------------------------------------------

_subject: Subject  # of this worker process


class Worker:
    """A process that judges damage to its own copy of the runs. If it dies or hangs, that is a finding, and the next
    damage is judged by a new process on a new copy."""

    def __init__(self, template: Path, root: str, names: Sequence[str], cache: Path):
        self.template, self.root, self.names, self.cache = template, root, names, cache
        self.lives = 0
        self._start()

    def _start(self) -> None:
        self.lives += 1
        root = f"{self.root}-{self.lives}"
        copy_runs(str(self.template), root, self.names)
        spawn = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(1, spawn, _begin, (root, self.names, self.cache))
        self.pool.submit(int).result()  # an error at the start is not a finding

    def judge(self, damage: Damage) -> Judged:
        try:
            return self.pool.submit(_judge, damage).result()
        except BrokenProcessPool:
            self._start()
            return Judged(damage, "crashed", [f"the process died, or had no answer after {LONGEST:g} s"])


def _begin(root: str, names: Sequence[str], cache: Path) -> None:
    global _subject
    logging.disable(logging.ERROR)
    os.environ["TBA_CACHE"] = str(cache)
    _subject = Subject(root, names, cache)


def _judge(damage: Damage) -> Judged:
    faulthandler.dump_traceback_later(LONGEST, exit=True)
    try:
        return _subject.judge(damage)
    finally:
        faulthandler.cancel_dump_traceback_later()


def summarise(judged: Sequence[Judged]) -> dict[str, Any]:
    """Count the verdicts by kind of object, and list the findings."""
    counted = Counter((it.damage.kind, it.verdict) for it in judged)
    return {
        "number": len(judged),
        "seconds_each": round(sum(it.seconds for it in judged) / max(1, len(judged)), 3),
        "verdicts": {kind: [counted[kind, it] for it in VERDICTS] for kind in sorted({kind for kind, _ in counted})},
        "findings": [
            {"finding": str(it.damage), "verdict": it.verdict, "reasons": it.reasons, **asdict(it.damage)}
            for it in sorted(judged, key=lambda it: (it.damage.kind, it.damage.key, it.damage.offset))
            if it.verdict in FINDINGS
        ],
    }


def show(title: str, summary: dict[str, Any]) -> None:
    print(f"\n{title}: {summary['number']}, {summary['seconds_each']} s each\n")
    print("| kind of object |", " | ".join(VERDICTS), "|\n|---|" + "---:|" * len(VERDICTS))
    for kind, numbers in summary["verdicts"].items():
        print(f"| {kind} |", " | ".join(map(str, numbers)), "|")
    for it in summary["findings"]:
        print(f"\n{it['verdict']}: {it['finding']}", *it["reasons"][:5], sep="\n    ")


@contextmanager
def root_of(store: str, scratch: Path) -> Iterator[str]:
    if store == "local":
        yield str(scratch / "copy")
        return
    with servers.s3(scratch) as server:
        os.environ.update(server.environment())
        yield f"s3://{servers.BUCKET}/copy"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", choices=["local", "s3"], default="local")
    parser.add_argument("--run", type=Path, nargs="+", metavar="FOLDER", help="damage copies of these runs instead")
    parser.add_argument(
        "--also-removals", action="store_true", help="also remove, halve and double objects, a fifth as often"
    )
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder for flips.json")
    options = parser.parse_args(arguments)
    logging.disable(logging.ERROR)
    began, chance = time.monotonic(), random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="tba-flips-") as name, ExitStack() as stack:
        scratch = Path(name)
        os.environ["TBA_CACHE"] = str(scratch / "cache")
        template = scratch / "template"
        for folder in options.run or ():
            shutil.copytree(folder, template / layout.RUNS / folder.resolve().name)
        names = [folder.resolve().name for folder in options.run or ()] or make_runs(str(template))
        root = stack.enter_context(root_of(options.store, scratch))
        workers = [Worker(template, f"{root}-{n}", names, scratch / f"cache-{n}") for n in range(options.processes)]
        pool = stack.enter_context(ThreadPoolExecutor(len(workers)))
        for worker in workers:
            stack.callback(lambda worker=worker: worker.pool.shutdown())  # the pool of the worker's last life
        results: dict[str, dict[str, Any]] = {}
        for title in ("flips", "removals") if options.also_removals else ("flips",):
            number, removals = (options.flips, False) if title == "flips" else (options.flips // 5, True)
            planned = plan_damage(str(template), names, number, chance, removals=removals)
            shares = [planned[n :: len(workers)] for n in range(len(workers))]
            answered = pool.map(lambda worker, share: [worker.judge(damage) for damage in share], workers, shares)
            judged = [it for share in answered for it in share]
            results[title] = summarise(judged)
            show(title, results[title])
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        facts = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            **hardware(),
            "settings": {name: str(value) for name, value in vars(options).items() if name not in ("out", "run")},
            "seconds": round(time.monotonic() - began, 1),
        }
        (options.out / "flips.json").write_text(json.dumps({**facts, **results}, indent=1) + "\n")
    return int(any(summary["findings"] for summary in results.values()))


if __name__ == "__main__":
    sys.exit(main())
