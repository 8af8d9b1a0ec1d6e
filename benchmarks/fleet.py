"""Simulate up to a thousand searchers by the real code of storage: only generation is replaced, by waiting.

    python -m benchmarks.fleet [--searchers 10 30 100 300 1000] [--stored 0 20000] [--seconds 60] [--store disk]

Each searcher waits for `--pace` seconds, stores a shard of `--rows` trajectories durably, and waits again. Searchers
share one process with some threads, and a process of its own plays the trainer: every `--sync` seconds it looks for
arrivals, admits them by a sync record, and draws and fetches batches. `--stored` is the number of shards that are
admitted before. Each line of the result is appended to a CSV at once; a line that the CSV has is not measured again. S3
is Ceph's gateway on loopback if it is installed, else moto, which is slower by far.
"""

import argparse
import gc
import heapq
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from benchmarks.harness import rows, servers
from benchmarks.harness.filled_runs import make_round, renamed
from benchmarks.harness.timing import seconds_of
from storage import layout
from storage.buffer.replay_buffer import DuckReplayBuffer
from storage.buffer.sampler import default_sampler
from storage.log.schema import encode, to_table
from storage.log.trajectories import Trajectories
from storage.runs.events import Events
from storage.runs.run import Run
from storage.weights.attempt_claim import claim_attempt
from tba.config import Config, parse
from tba.presets import preset
from tba.types import Trajectory, Version

PER_PROMPT = 4  # responses to a prompt in a shard
TOKENS = 64  # mean length of a response
THREADS = 16  # appends at the same time
FILLED_AT_ONCE = 2000  # shards that a record admits before the measurement
PATIENCE = 600.0


@dataclass(frozen=True)
class Line:
    """One measurement. Times are medians over the syncs or appends of the measurement."""

    store: str
    searchers: int
    stored: int  # shards that were stored and admitted before
    pace: float  # seconds that a searcher waits between two shards
    rows: int  # trajectories in a shard
    seconds: float
    per_second: float  # trajectories that were stored
    of_linear: float  # of what searchers would store if storing took no time
    append_ms: float
    append_p95_ms: float
    bytes_per_second: float
    start_ms: float  # for a searcher to find its place in the log
    syncs: int
    arrived: float  # shards that a look found
    look_ms: float  # to find, read and check them
    idle_look_ms: float  # for a look that finds nothing
    admit_ms: float  # to write the record and extend the index
    record_kb: float
    draw_ms: float
    fetch_ms: float
    memory_bytes: float  # of the trainer, per trajectory admitted before; 0 if there were fewer than 100,000

    @property
    def name(self) -> tuple[Any, ...]:
        return self.store, self.searchers, self.stored, self.pace, self.rows, self.seconds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--searchers", type=int, nargs="+", default=[10, 30, 100, 300, 1000])
    parser.add_argument("--stored", type=int, nargs="+", default=[0, 20_000])
    parser.add_argument("--pace", type=float, default=20.0)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--sync", type=float, default=5.0, help="seconds from one sync to the next")
    parser.add_argument("--store", choices=["disk", "s3"], default="disk")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/fleet.csv")
    parser.add_argument("--work", type=Path, help="folder in which runs are made (default: the system's choice)")
    parser.add_argument("--search", help="play the searchers of this run, and print JSON")
    options = parser.parse_args(arguments)
    if options.search:
        print(json.dumps(search(Run.open(options.search), options)))
        return
    done = {line.name for line in rows.read(options.out, Line)}
    for stored in options.stored:
        for searchers in options.searchers:
            name = options.store, searchers, stored, options.pace, options.rows, options.seconds
            if name not in done:
                line = measure(searchers, stored, options)
                rows.append(options.out, line)
                print(json.dumps(asdict(line)), flush=True)


def measure(searchers: int, stored: int, options: argparse.Namespace) -> Line:
    with tempfile.TemporaryDirectory(dir=options.work) as work, root_of(options.store, Path(work)) as root:
        run = make_run(root)
        trainer = Trainer(run)
        memory_bytes = trainer.fill(searchers, stored, options.rows)
        command = [sys.executable, "-m", "benchmarks.fleet", "--search", run.url]
        command += ["--searchers", str(searchers), "--stored", str(stored), "--pace", str(options.pace)]
        command += ["--rows", str(options.rows), "--seconds", str(options.seconds)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            trainer.follow(process, every=options.sync)
            assert process.stdout
            told = json.loads(process.stdout.read().splitlines()[-1])
        if process.returncode:
            raise RuntimeError(f"the searchers ended with exit code {process.returncode}")
    return Line(
        store=options.store,
        searchers=searchers,
        stored=stored,
        pace=options.pace,
        rows=options.rows,
        seconds=options.seconds,
        **told,
        **trainer.told(),
        memory_bytes=memory_bytes,
    )


@contextmanager
def root_of(store: str, work: Path) -> Iterator[str]:
    if store == "disk":
        yield str(work)
        return
    with ExitStack() as stack:
        server = stack.enter_context(servers.s3(work))
        stack.enter_context(patch.dict(os.environ, {**server.environment(), "TBA_CACHE": str(work / "copies")}))
        yield f"s3://{servers.BUCKET}/fleet"


def make_config() -> Config:
    return preset("quickstart").replace(
        {
            "sampling.copies": "all",  # all shards have the same texts
            "sampling.capacity": 100,
            "limits.memory_gb": 0.01,  # so that the memory is that of the index and of names
            "search.responses_per_prompt": 20,
            "training.prompts_per_step": 7,
            "training.groups_per_micro_batch": 7,
            "training.responses_per_prompt": 20,
        }
    )


def make_run(root: str) -> Run:
    config = make_config().to_dict()
    return Run.create(root, "fleet", config=config, sampler_sql=default_sampler(), code_version="benchmark")


def round_of(searcher: int, size: int) -> list[Trajectory]:
    """Return a round of a searcher, to prompts that no other searcher has."""
    template = make_round(prompts=size // PER_PROMPT, responses=PER_PROMPT, tokens=TOKENS)
    first = Version(0, 1)
    return [
        replace(
            it,
            searcher=searcher,
            prompt_id=f"{it.prompt_id}/{searcher}",
            group_id=f"{searcher}/0/{it.prompt_id}",
            version_start=first,
            version_end=first,
        )
        for it in template
    ]


# --- searchers --------------------------------------------------------------------------------------------------------


class Log(Trajectories):
    def begin(self, searcher: int, seq: int) -> None:
        """Let a searcher continue at `seq`, as `next_seq` does, which reads all sync records for each searcher."""
        self._taken[searcher] = seq - 1


def search(run: Run, options: argparse.Namespace) -> dict[str, float]:
    """Play searchers, each beginning at another moment of its pace, and return what storing took."""
    [searchers], [stored] = options.searchers, options.stored
    log, random = Log(run), Random(0)
    start_ms = 1e3 * statistics.median(seconds_of(lambda it=it: log.next_seq(it)) for it in range(min(5, searchers)))
    rounds = [round_of(searcher, options.rows) for searcher in range(searchers)]
    seqs = [len(range(searcher, stored, searchers)) for searcher in range(searchers)]
    for searcher, seq in enumerate(seqs):
        log.begin(searcher, seq)
    began = time.monotonic()
    due = [(began + random.random() * options.pace, searcher) for searcher in range(searchers)]
    heapq.heapify(due)
    appends: list[float] = []

    def store(searcher: int) -> None:
        appends.append(seconds_of(lambda: log.append(searcher, seqs[searcher], rounds[searcher])))
        seqs[searcher] += 1
        heapq.heappush(due, (time.monotonic() + options.pace, searcher))

    jobs: list[Future[None]] = []
    with ThreadPoolExecutor(THREADS) as pool:
        while (now := time.monotonic()) < began + options.seconds:
            while due and due[0][0] <= now:
                jobs.append(pool.submit(store, heapq.heappop(due)[1]))
            time.sleep(0.002)
        count, seconds = len(appends), time.monotonic() - began
    for job in jobs:
        job.result()  # raises the error of a searcher that stopped
    size = len(encode(to_table(rounds[0], run=run.name, searcher=0, seq=0)))
    linear = searchers * options.rows / options.pace
    times = sorted(appends[:count])
    return {
        "per_second": round(count * options.rows / seconds, 2),
        "of_linear": round(count * options.rows / seconds / linear, 4),
        "append_ms": round(1e3 * statistics.median(times), 2),
        "append_p95_ms": round(1e3 * times[int(0.95 * (len(times) - 1))], 2),
        "bytes_per_second": round(count * size / seconds),
        "start_ms": round(start_ms, 2),
    }


# --- the trainer ------------------------------------------------------------------------------------------------------


class Trainer:
    """Admits what has arrived, and draws and fetches batches, by the replay buffer of a trainer."""

    def __init__(self, run: Run):
        self.run = run
        attempt, config = claim_attempt(run), parse(run.config)
        self.buffer = DuckReplayBuffer(
            run, config, sampler_sql=run.sampler_sql, attempt=attempt.number, events=Events(run, "trainer", 1)
        )
        names = ("look_ms", "idle_look_ms", "admit_ms", "draw_ms", "fetch_ms")
        self.times: dict[str, list[float]] = {name: [] for name in names}
        self.arrived: list[int] = []
        self.records: list[int] = []
        self.sync = 0
        self.step = 0
        self.buffer.sync(0, step=0)

    def fill(self, searchers: int, stored: int, size: int) -> float:
        """Store and admit shards, without waiting for the disk. Return the growth of memory per trajectory."""
        gc.collect()
        before = resident()
        tables = [to_table(round_of(it, size), run=self.run.name, searcher=it, seq=0) for it in range(searchers)]
        for number in range(stored):
            searcher, seq = number % searchers, number // searchers
            data = encode(renamed(tables[searcher], self.run.name, searcher, seq))
            key = layout.shard(searcher, seq)
            if (path := self.run.store.local_path(key)) is None:
                self.run.store.create(key, data)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            if (number + 1) % FILLED_AT_ONCE == 0 or number == stored - 1:
                self.admit()
        del tables
        gc.collect()
        for values in (*self.times.values(), self.arrived, self.records):
            values.clear()
        self.times["idle_look_ms"] += [seconds_of(self.buffer.arrivals.look) for _ in range(5)]
        return round((resident() - before) / (stored * size), 1) if stored * size >= 100_000 else 0.0

    def follow(self, process: "subprocess.Popen[str]", *, every: float) -> None:
        """Sync until the searchers have ended."""
        ends = time.monotonic() + PATIENCE
        while process.poll() is None:
            if time.monotonic() > ends:
                process.kill()
                raise RuntimeError(f"the searchers did not end within {PATIENCE:g} s")
            began = time.monotonic()
            self.admit()
            self.read()
            time.sleep(max(0.0, every - (time.monotonic() - began)))

    def admit(self) -> None:
        self.sync += 1
        self.step += 1
        look = seconds_of(self.buffer.waiting)
        shards = len(self.buffer.arrivals.found)
        admit = seconds_of(lambda: self.buffer.sync(self.sync, step=self.step))
        if shards:  # the first looks come before the first shards
            self.times["look_ms"].append(look)
            self.times["admit_ms"].append(admit)
            self.arrived.append(shards)
            self.records.append(len(self.run.store.read(layout.sync(self.sync))))

    def read(self) -> None:
        if self.buffer.index.newest is None:
            return
        self.step += 1
        draws: list[Any] = []
        self.times["draw_ms"].append(seconds_of(lambda: draws.extend(self.buffer.draw(self.step))))
        self.times["fetch_ms"].append(seconds_of(lambda: self.buffer.fetch(draws)))

    def told(self) -> dict[str, Any]:
        medians = {name: round(1e3 * statistics.median(it), 2) if it else 0.0 for name, it in self.times.items()}
        record_kb = round(statistics.median(self.records) / 1e3, 1) if self.records else 0.0
        arrived = round(statistics.median(self.arrived), 1) if self.arrived else 0.0
        return {"syncs": len(self.times["look_ms"]), "arrived": arrived, "record_kb": record_kb, **medians}


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
