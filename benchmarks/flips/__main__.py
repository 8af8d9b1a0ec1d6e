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
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.flips.damage import Damage, plan_damage
from benchmarks.flips.small_run import answers, copy_runs, make_runs, put
from benchmarks.harness import servers
from benchmarks.harness.hardware import hardware
from storage import layout
from storage.maintenance.check import Problem, check
from storage.objects.open_store import open_store
from storage.runs.run import Run
from tba.errors import TBAError

VERDICTS = ("named", "named by another", "harmless", "changed", "crashed")
FINDINGS = ("changed", "crashed")
LONGEST = 300.0  # seconds for one flip; a process that takes longer is killed


@dataclass(frozen=True)
class Judged:
    damage: Damage
    verdict: str
    reasons: list[str]  # problems, answers that changed, or a traceback
    seconds: float = 0.0


# --- judging ----------------------------------------------------------------------------------------------------------


class Subject:
    """Copies of runs that are damaged in one place at a time, and their answers while undamaged. `cache` is
    `$TBA_CACHE`. It is emptied before each check, because copies in it would hide damage in the store."""

    def __init__(self, root: str, names: Sequence[str], cache: Path):
        self.urls = {name: layout.run_url(root, name) for name in names}
        self.cache = cache
        self.known = {name: self._problems(name) for name in names}
        self.whole = self._answers()

    def judge(self, damage: Damage) -> Judged:
        began = time.perf_counter()
        store = open_store(self.urls[damage.run])
        data = store.read(damage.key)
        try:
            put(store, damage.key, damage.applied(data))
            verdict, reasons = self._verdict(damage)
        except Exception:
            verdict, reasons = "crashed", [traceback.format_exc()]
        finally:
            put(store, damage.key, data)
        if verdict == "changed" and (unsteady := self._differing()):
            raise RuntimeError(f"answers of an undamaged run are not always the same: {unsteady}")
        return Judged(damage, verdict, reasons, time.perf_counter() - began)

    def _verdict(self, damage: Damage) -> tuple[str, list[str]]:
        for name in sorted(self.urls, key=lambda name: name != damage.run):
            problems = [problem for problem in self._problems(name) if problem not in self.known[name]]
            if problems:
                is_there = name == damage.run or damage.key.startswith(layout.SHARED)
                named = is_there and any(_is_about(problem, damage.key) for problem in problems)
                said = [f"{problem.key}: {problem.problem}" for problem in problems]
                return "named" if named else "named by another", said
        differing = self._differing()
        return "changed" if differing else "harmless", differing

    def _problems(self, name: str) -> list[Problem]:
        """Return the problems that the check finds in a run. An error that ends the check, or that keeps the run from
        being opened, is a problem without a key."""
        shutil.rmtree(self.cache, ignore_errors=True)
        try:
            return check(Run.open(self.urls[name])).problems
        except TBAError as error:
            return [Problem("", str(error))]

    def _answers(self) -> dict[str, str]:
        shutil.rmtree(self.cache, ignore_errors=True)
        of_each = {name: answers(Run.open(url)) for name, url in self.urls.items()}
        return {f"{name}: {about}": it for name, found in of_each.items() for about, it in found.items()}

    def _differing(self) -> list[str]:
        now = self._answers()
        names = [name for name in {**self.whole, **now} if self.whole.get(name) != now.get(name)]
        return [f"{name}: {now.get(name, 'gone') if len(now.get(name, '')) != 64 else 'another'}" for name in names]


def _is_about(problem: Problem, key: str) -> bool:
    """True if a problem names this object, or the version or checkpoint that the object belongs to. A problem without a
    key is about the objects in its text, and always about `run.json`."""
    if not problem.key:
        return key in problem.problem or key == layout.RUN
    return problem.key == key or (problem.key.endswith("/") and key.startswith(problem.key))


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
