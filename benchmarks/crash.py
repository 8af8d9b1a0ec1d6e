"""SIGKILL at every named publish point and at random instants: is anything lost, doubled, or learned otherwise?

    python -m benchmarks.crash [--kills 240] [--stores local s3] [--seed 0] [--out FOLDER]

Runs of a tiny policy; their trainer, its reader, searcher and evaluator, and a process that compacts what they have
admitted, are killed again and again and started again. A kill is planned for one of the writes in `POINTS`, before,
after or in the middle of it, or for a random instant. After each kill `tba check` must find nothing wrong. When a run
has finished, everything that a process had been told is stored must be there, byte by byte (a shard that was compacted
by its checksum), the first and the last version must have their scores and no version more than once, and a fork that
replays the run's records from the start, unbroken, must have drawn the same trajectories, found the same numbers for
each of them and ended every sync with the same weights.

`s3` is Ceph's gateway where it is installed, else a simulation of S3.
"""

import argparse
import json
import logging
import multiprocessing
import os
import platform
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from itertools import cycle, islice
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, cast

import storage
from flows import forks, plan, reader
from flows.compact import compact_run
from flows.processes import FAILED
from flows.role import live
from storage import layout
from storage.check import check
from storage.compactions import Compactions
from storage.control import change_state
from storage.retention import given_up
from storage.run import Run
from storage.store import Store
from tests import servers
from tests.flows.roles import DRAWS, LEDGER

POINTS = {
    "shard": ("searcher", "create", r"trajectories/.*"),
    "attempt": ("trainer", "create", r"attempts/.*"),
    "part of a version": ("trainer", "upload", r"versions/.*"),
    "manifest of a version": ("trainer", "create", r"versions/.*"),
    "record": ("trainer", "create", r"syncs/.*"),
    "draws": ("trainer", "create", r"draws/.*"),
    "steps": ("trainer", "create", r"steps/.*"),
    "part of a checkpoint": ("trainer", "upload", r"checkpoints/.*"),
    "manifest of a checkpoint": ("trainer", "create", r"checkpoints/.*"),
    "retention record": ("trainer", "create", r"retention/.*"),
    "removal of a manifest": ("trainer", "delete", r".*/MANIFEST.json"),
    "removal of a part": ("trainer", "delete", r".*(?<!MANIFEST.json)"),
    "scores": ("evaluator", "create", r"evaluations/.*"),
    "compaction": ("compaction", "create", r"compactions/.*\.parquet"),
    "record of a compaction": ("compaction", "create", r"compactions/.*\.json"),
    "removal of a shard": ("compaction", "delete", r"trajectories/.*"),
    "removal of a compaction": ("compaction", "delete", r"compactions/.*\.parquet"),
    "removal of its record": ("compaction", "delete", r"compactions/.*\.json"),
}
"""Who writes, how, and what."""
MOMENTS = ("before", "during", "after")
ONCE = ("attempt", "scores", *(name for name, (role, _, _) in POINTS.items() if role == "compaction"))
"""Points that are not passed three times in every life."""
RANDOM = "a random instant"
PASSING = ("control/", "compactions/")
"""What is replaced: states, and compactions by larger ones, whose rows a check compares with the records."""

SETTINGS = {
    "training.steps": 200,
    "training.prompts_per_step": 4,
    "training.groups_per_micro_batch": 4,
    "search.prompts_per_round": 8,
    "search.initial_fill": 64,
    "sync.every": 2,
    "sync.checkpoint_every": 2,
    "sync.keep_checkpoints": 2,
    "sync.keep_versions": 2,
    "evaluation.every": 4,
    "evaluation.prompts": 4,
    "limits.lease_every": 0.5,
    "limits.silent_after": 20,
    "limits.store_deadline": 20,
}
COMMAND = [sys.executable, "-m", "benchmarks.crash"]
ROLES = ("trainer", "searcher", "evaluator", "compaction")
SCORES = """
select version, max(times)
from (select version, metric, count(*) as times from evaluations where not abandoned group by all)
group by 1
"""
KILLS_PER_RUN = 30
ROUND_EVERY = 0.15  # seconds: a searcher that is slowed down leaves time to look at what it stores
COMPACT_EVERY = 1.0  # seconds
LONGEST_LIFE = 120.0

forkserver = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Kill:
    """Of which role, when: at the n-th write of a point, or after so many seconds."""

    role: str
    point: str
    moment: str = ""
    nth: int = 1
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.point} of the {self.role}" if self.point == RANDOM else f"{self.moment} {self.point}"

    @property
    def process(self) -> str:
        """Which of `ROLES` is started to be killed: a reader has its trainer."""
        return "trainer" if self.role == "reader" else self.role


@dataclass
class Findings:
    """What came of the runs on one store."""

    store: str
    runs: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    trajectories: int = 0
    compacted: int = 0  # shards that lie in compactions at the end
    acknowledged: int = 0  # objects that a process had been told are stored
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # problems that a check found
    differing: list[str] = field(default_factory=list)  # runs that an unbroken one does not repeat bit by bit
    seconds: float = 0.0


# --- in the processes that are killed -------------------------------------------------------------------------------


class Deadly:
    """A store that kills its process at one of its writes, and notes every object that is known to be stored."""

    def __init__(self, store: Store, kill: Kill | None, notes: Path, seed: int, *, die_with: Sequence[int] = ()):
        self.store, self.kill, self.notes, self.random = store, kill, notes, random.Random(seed)
        self.doomed = [*die_with, os.getpid()]
        self.left = kill.nth if kill else 0
        self.lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)
        return partial(self.write, name, method) if name in ("create", "upload", "delete") else method

    def write(self, name: str, method: Any, *arguments: Any) -> None:
        key = arguments[1] if name == "upload" else arguments[0]
        moment = self.moment(name, key)
        if moment == "before":
            self.die()
        if moment == "during":
            threading.Thread(target=method, args=arguments, daemon=True).start()
            time.sleep(self.random.uniform(0, 0.004))
            self.die()
        method(*arguments)
        if moment == "after":
            self.die()
        if name == "create":
            with self.notes.open("a") as file:
                file.write(f"{sha256(arguments[1]).hexdigest()} {key}\n")
            if key.startswith(layout.TRAJECTORIES):
                time.sleep(ROUND_EVERY)

    def die(self) -> None:
        for pid in self.doomed:
            os.kill(pid, signal.SIGKILL)
        time.sleep(60)

    def moment(self, name: str, key: str) -> str:
        """When to die, if this is the write."""
        if not (self.kill and self.kill.point in POINTS):
            return ""
        _, operation, pattern = POINTS[self.kill.point]
        if name != operation or not re.fullmatch(pattern, key):
            return ""
        with self.lock:
            self.left -= 1
            return self.kill.moment if self.left == 0 else ""


def life(role: str, url: str, kill: Kill | None, notes: str, seed: int, environment: dict[str, str]) -> None:
    """One life of a role, in a process of its own. Its environment is that of whoever started it."""
    os.environ.update(environment)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    reader.COMMAND[:] = [*COMMAND, "--reader", json.dumps([kill and vars(kill), notes, seed])]
    run = Run.open(url)
    run = replace(run, store=cast(Store, Deadly(run.store, kill, Path(notes), seed)))
    os._exit(keep_compacting(run) if role == "compaction" else live(role, 0, run))


def read(given: str, arguments: Sequence[str]) -> None:
    """The reader of such a trainer. It writes the trainer's records, and when it dies the trainer dies with it."""
    kill, notes, seed = json.loads(given)

    def open_run(url: str) -> Run:
        run, kills = Run.open(url), Kill(**kill) if kill else None
        return replace(run, store=cast(Store, Deadly(run.store, kills, Path(notes), seed, die_with=[os.getppid()])))

    reader.main(arguments, open_run)


def keep_compacting(run: Run) -> int:
    while True:
        compact_run(run)
        time.sleep(COMPACT_EVERY)


# --- in the process that kills --------------------------------------------------------------------------------------


def planned(number: int, chance: random.Random) -> list[Kill]:
    """Half of them at named points, each at every moment as often as there is room for, and half at random instants."""
    named = [(point, moment) for point in POINTS for moment in MOMENTS]
    kills = [
        Kill(POINTS[point][0], point, moment, nth=1 if point in ONCE else chance.randint(1, 3))
        for point, moment in islice(cycle(named), number - number // 2)
    ]
    kills += [
        Kill(chance.choice(("trainer", "reader", *ROLES)), RANDOM, seconds=chance.uniform(0.1, 6.0))
        for _ in range(number // 2)
    ]
    chance.shuffle(kills)
    return kills


def start(role: str, run: Run, kill: Kill | None, notes: Path, seed: int) -> ForkServerProcess:
    process = forkserver.Process(target=life, args=(role, run.url, kill, str(notes), seed, dict(os.environ)))
    process.start()
    return process


def end(process: ForkServerProcess) -> None:
    process.kill()
    process.join()


def one_run(run: Run, kills: list[Kill], notes: Path, findings: Findings, chance: random.Random) -> None:
    """Kill roles of a run until it has finished, or enough were killed; then let it finish."""
    roles = {name: start(name, run, None, notes, 0) for name in ROLES}
    try:
        for _ in range(KILLS_PER_RUN):
            if not kills or roles["trainer"].exitcode == 0:
                break
            kill = kills.pop()
            name = kill.process
            end(roles[name])
            roles[name] = start(name, run, kill, notes, chance.getrandbits(32))
            if die_as_planned(roles[name], kill, roles):
                findings.kills[kill.name] += 1
                look(run, findings, f"after a kill {kill.name}")
            elif 0 not in (roles["trainer"].exitcode, roles[name].exitcode):
                findings.wrong.append(f"{run.name}: {name} ended with {roles[name].exitcode}: {kill.name}")
            else:
                kills.insert(0, kill)
            if roles[name].exitcode != 0:
                end(roles[name])
                roles[name] = start(name, run, None, notes, 0)
        for name in ("trainer", "evaluator"):  # each ends by itself
            roles[name].join(5 * LONGEST_LIFE)
            if roles[name].exitcode != 0:
                findings.wrong.append(f"{run.name}: the {name} ended with {roles[name].exitcode}")
    finally:
        for process in roles.values():
            end(process)


def die_as_planned(process: ForkServerProcess, kill: Kill, roles: dict[str, ForkServerProcess]) -> bool:
    """Whether it was killed; a trainer may finish its run before, and a searcher then waits for nothing."""
    deadline = time.monotonic() + LONGEST_LIFE
    if kill.point == RANDOM:
        process.join(kill.seconds)
        if kill.role == "reader":
            return fails_without_reader(process)
        alive = process.is_alive()
        process.kill()
        process.join()
        return alive
    while process.is_alive() and time.monotonic() < deadline:
        process.join(0.05)
        if roles["trainer"].exitcode == 0:
            end(process)
    return process.exitcode == -signal.SIGKILL and roles["trainer"].exitcode != 0


def fails_without_reader(trainer: ForkServerProcess) -> bool:
    """A trainer whose reader is killed says so and ends by itself; one that has finished before has none."""
    pids = list[int]()
    while trainer.is_alive() and not (pids := readers_of(trainer)):
        trainer.join(0.02)
    if not trainer.is_alive():
        return False
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    trainer.join(LONGEST_LIFE)
    return trainer.exitcode == FAILED


def readers_of(trainer: ForkServerProcess) -> list[int]:
    try:
        children = Path(f"/proc/{trainer.pid}/task/{trainer.pid}/children").read_text().split()
        return [int(pid) for pid in children if b"--reader" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    except OSError:  # gone meanwhile
        return []


def look(run: Run, findings: Findings, when: str) -> None:
    findings.wrong += [f"{run.name} {when}: {it.key}: {it.problem}" for it in check(run).problems]


def finish(run: Run, notes: Path, findings: Findings) -> None:
    """What a finished run has lost, and whether an unbroken one repeats it."""
    look(run, findings, "at the end")
    removed = given_up(run)
    gone = {layout.version(it) for it in removed.versions} | {layout.checkpoint(it) for it in removed.checkpoints}
    acknowledged = [line.split(" ", 1) for line in notes.read_text().splitlines()]
    compactions = Compactions(run)
    compactions.look()
    compacted = compactions.shards()
    findings.compacted += len(compacted)
    for digest, key in acknowledged:
        if key.startswith(PASSING) or any(key.startswith(folder) for folder in gone):
            continue
        whole = run.store.exists(key) and sha256(run.store.read(key)).hexdigest() == digest
        if not whole and not (key in compacted and compacted[key].sha256 == digest):
            findings.lost.append(f"{run.name}: {key}")
    unbroken = forks.fork(run, 0, {}, name=f"{run.name}-unbroken", replay=True)
    trainer = start("trainer", unbroken, None, notes.with_suffix(".unbroken"), 0)
    trainer.join(10 * LONGEST_LIFE)
    look(unbroken, findings, "unbroken")
    for what, query in (("steps", LEDGER), ("draws", DRAWS)):
        with storage.connect(run) as ours, storage.connect(unbroken) as theirs:
            if ours.execute(query).fetchall() != theirs.execute(query).fetchall():
                findings.differing.append(f"{run.name}: {what}")
    with storage.connect(run) as con:
        counts = con.execute("select (select count(*) from steps), (select count(*) from trajectories)").fetchone()
        scored = dict(con.execute(SCORES).fetchall())
    steps, trajectories = counts or (0, 0)
    if not scored.keys() >= {0, SETTINGS["training.steps"] // SETTINGS["sync.every"]} or set(scored.values()) != {1}:
        findings.wrong.append(f"{run.name}: scores by version: {scored}")
    if steps != SETTINGS["training.steps"]:
        findings.lost.append(f"{run.name}: it has {steps} steps")
    findings.steps += steps
    findings.trajectories += trajectories
    findings.acknowledged += len(acknowledged)


def measure(
    findings: Findings, root: str, policy: Path, kills: list[Kill], scratch: Path, seed: int, keep: Callable[[], None]
) -> None:
    store, chance, began = findings.store, random.Random(seed), time.monotonic()
    while kills:
        notes = scratch / f"{store}-{findings.runs}"
        notes.touch()
        config = plan.resolve("quickstart", {**SETTINGS, "model.path": str(policy), "seed": findings.runs})
        run = plan.start(config, root, f"crash-{findings.runs}")
        one_run(run, kills, notes, findings, chance)
        change_state(run, desired="stop", why="finished")
        finish(run, notes, findings)
        findings.runs += 1
        findings.seconds = round(time.monotonic() - began, 1)
        print(say(findings), file=sys.stderr)
        keep()


def say(it: Findings) -> str:
    return (
        f"{it.store}: {sum(it.kills.values())} kills at {len(it.kills)} kinds of instants, {it.runs} runs, "
        f"{it.steps} steps, {it.trajectories} trajectories, {it.compacted} shards compacted, "
        f"{it.acknowledged} acknowledged objects: "
        f"{len(it.lost)} lost, {len(it.wrong)} problems, {len(it.differing)} differences from an unbroken run"
    )


@contextmanager
def root_of(store: str, scratch: Path) -> Iterator[tuple[str, str]]:
    """What the store is, and a root on it."""
    if store == "local":
        yield "local disk", str(scratch / "local")
        return
    with ExitStack() as stack:
        is_real = not servers.lacking_for_ceph()
        server = stack.enter_context((servers.ceph if is_real else servers.moto)(scratch))
        os.environ.update(server.environment())
        yield "S3 (Ceph)" if is_real else "S3 (simulated)", f"s3://{servers.BUCKET}/crash"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=240, help="in all, shared by the stores")
    parser.add_argument("--stores", nargs="+", choices=["local", "s3"], default=["local", "s3"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for the results as JSON")
    parser.add_argument("--reader", help="be the reader of a trainer that is killed")
    options, rest = parser.parse_known_args(arguments)
    logging.disable(logging.WARNING)
    if options.reader:
        read(options.reader, rest)
        return 0
    if rest:
        parser.error(f"unknown arguments: {' '.join(rest)}")
    from tests.tba.tiny import tiny_folder  # and torch, which a reader does not need

    forkserver.set_forkserver_preload(["flows.wiring"])
    results: list[Findings] = []

    def keep() -> None:
        """What is known so far: all of it takes long."""
        if not options.out:
            return
        options.out.mkdir(parents=True, exist_ok=True)
        facts = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "seed": options.seed,
            "settings": SETTINGS,
            "results": [{**vars(it), "kills": dict(it.kills)} for it in results],
        }
        (options.out / "crash.json").write_text(json.dumps(facts, indent=1) + "\n")

    with tempfile.TemporaryDirectory(prefix="tba-crash-") as name:
        scratch = Path(name)
        os.environ["TBA_CACHE"] = str(scratch / "cache")
        policy = tiny_folder(scratch / "policy")
        for store in options.stores:
            with root_of(store, scratch) as (kind, root):
                kills = planned(options.kills // len(options.stores), random.Random(options.seed))
                results.append(Findings(kind))
                measure(results[-1], root, policy, kills, scratch, options.seed, keep)
    for found in results:
        print(say(found), f"({found.seconds:.0f} s)")
        for problem in [*found.lost, *found.wrong, *found.differing][:20]:
            print("  ", problem)
    return int(any(found.lost or found.wrong or found.differing for found in results))


if __name__ == "__main__":
    sys.exit(main())
