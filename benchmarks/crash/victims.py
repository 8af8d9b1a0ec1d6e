"""Runs a role that is to be killed. Its store notes every stored object, and kills the process at the planned write.

`python -m benchmarks.crash.victims '[KILL, NOTES, SEED]' --run …` runs the buffer process of such a trainer.
"""

import json
import multiprocessing
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, cast

from benchmarks.crash.kills import POINTS, Kill
from flows.commands.compact import compact_run
from flows.roles import buffer_process
from flows.roles.role import live
from storage import layout
from storage.objects.store import Store
from storage.runs.run import Run

COMMAND = [sys.executable, "-m", "benchmarks.crash.victims"]
CHECKPOINT = re.compile(rf"checkpoints/.*/{layout.MANIFEST}")
LONGEST_PAUSE = 5.0  # seconds: a searcher stores a shard after each record of its run, or after this time without one
COMPACT_EVERY = 5.0  # seconds
TORN_AFTER = 0.004  # seconds from the start of a write to a death in the middle of it, at most

PRELOADED = [
    "benchmarks.crash.victims",
    "flows.roles.wiring",
    "storage.objects.s3.store",
    "tba.train.leader",
    "torch.profiler",
    "transformers.models.llama.modeling_llama",
]

forkserver = multiprocessing.get_context("forkserver")


def preload() -> None:
    """Import the modules of all roles once, in the server that forks their processes."""
    forkserver.set_forkserver_preload(PRELOADED)


def start(role: str, run: Run, kill: Kill | None, notes: Path, seed: int) -> ForkServerProcess:
    process = forkserver.Process(target=life, args=(role, run.url, kill, str(notes), seed, dict(os.environ)))
    process.start()
    return process


def signal_of(notes: Path) -> Path:
    """Return the path of a file that exists once the trainer has stored the checkpoints that the kill requires."""
    return notes.with_suffix(".in-training")


class DeadlyStore:
    """A store that kills its process at the planned write, and notes every object whose write was acknowledged."""

    def __init__(self, store: Store, kill: Kill | None, notes: Path, seed: int, *, die_with: Sequence[int] = ()):
        self.store, self.kill, self.notes, self.random = store, kill, notes, random.Random(seed)
        self.doomed = [*die_with, os.getpid()]
        self.writes_left = kill.nth if kill else 0
        self.checkpoints_left = kill.checkpoints if kill else 0
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
            time.sleep(self.random.uniform(0, TORN_AFTER))
            self.die()
        method(*arguments)
        if moment == "after":
            self.die()
        if name == "create":
            self.note(key, arguments[1])

    def note(self, key: str, data: bytes) -> None:
        with self.notes.open("a") as file:
            file.write(f"{sha256(data).hexdigest()} {key}\n")
        if key.startswith(layout.TRAJECTORIES):
            self.await_record()
        if CHECKPOINT.fullmatch(key):
            with self.lock:
                self.checkpoints_left -= 1
                if self.checkpoints_left == 0:
                    signal_of(self.notes).touch()

    def await_record(self) -> None:
        """Wait until the trainer has stored a record. A searcher that keeps pace with the trainer stores the same
        amount of data, no matter how busy the machine is."""
        deadline, seen = time.monotonic() + LONGEST_PAUSE, self.notes.stat().st_size
        with self.notes.open() as file:
            file.seek(seen)
            while f" {layout.SYNCS}" not in file.read() and time.monotonic() < deadline:
                time.sleep(0.1)

    def die(self) -> None:
        for pid in self.doomed:
            os.kill(pid, signal.SIGKILL)
        time.sleep(60)

    def moment(self, name: str, key: str) -> str:
        """Return the moment to die if this write is the planned one, else an empty text."""
        if not (self.kill and self.kill.point in POINTS):
            return ""
        _, operation, pattern = POINTS[self.kill.point]
        if name != operation or not re.fullmatch(pattern, key):
            return ""
        if self.kill.checkpoints and not signal_of(self.notes).exists():
            return ""
        with self.lock:
            self.writes_left -= 1
            return self.kill.moment if self.writes_left == 0 else ""


def life(role: str, url: str, kill: Kill | None, notes: str, seed: int, environment: dict[str, str]) -> None:
    """Run a role for one life in its own process, with the environment of the process that started it."""
    os.environ.update(environment)
    log = os.open(f"{notes}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    buffer_process.COMMAND[:] = [*COMMAND, json.dumps([kill and vars(kill), notes, seed])]
    run = Run.open(url)
    run = replace(run, store=cast(Store, DeadlyStore(run.store, kill, Path(notes), seed)))
    os._exit(keep_compacting(run) if role == "compaction" else live(role, 0, run))


def read(plan: str, arguments: Sequence[str]) -> None:
    """Run the buffer process of a trainer. The process writes the trainer's records, and its planned death kills the
    trainer too."""
    fields, notes, seed = json.loads(plan)
    kill = Kill(**fields) if fields else None

    def open_run(url: str) -> Run:
        run = Run.open(url)
        store = DeadlyStore(run.store, kill, Path(notes), seed, die_with=[os.getppid()])
        return replace(run, store=cast(Store, store))

    buffer_process.main(arguments, open_run)


def keep_compacting(run: Run) -> int:
    while True:
        compact_run(run)
        time.sleep(COMPACT_EVERY)


if __name__ == "__main__":
    read(sys.argv[1], sys.argv[2:])
