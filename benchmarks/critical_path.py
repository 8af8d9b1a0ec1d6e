"""What a gradient step loses to all that reads for the next one, at growing numbers of trajectories.

    python -m benchmarks.critical_path [--sizes 10000 100000 1000000 10000000] [--out FOLDER] [--work FOLDER]

The reader of a trainer works beside its steps: it looks for arrivals and admits a record every k steps, draws 7 prompts
x 20 responses, fetches and collates them. Here it does so with the real buffer on a disk, in a thread on one core,
beside every second step of another thread on another core: what is counted is by how much such a step is longer than
the one before or after it. These are gradient steps of about half a second, of quickstart's policy; or as long a loop
of small matrix products, which no real step is as sensitive as.

Made-up rows fill the index, 100 per prompt; payloads are of real shards, of 100 trajectories (20 responses to each of 5
prompts) of about 90 + 230 tokens, of which 2 arrive per step. A drawn row that is made up stands for a row of one of
1000 such shards; memory holds few of them, so most are read from files. Each size has a process of its own; the largest
takes 6 GB.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import count, islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.index import PER_PROMPT, RESPONSES, SLOTS, Filled, hardware
from benchmarks.shards import SEARCHERS, filled, make_round
from flows.charts import Series, picture
from flows.role import SWITCH_SECONDS
from storage import layout
from storage.attempts import claim_attempt
from storage.events import Events
from storage.replay_buffer import DuckReplayBuffer
from storage.run import Run
from storage.sampler import default_sampler
from storage.schema import encode, to_table
from storage.syncs import Shard
from tba.batching import Batch
from tba.config import quickstart
from tba.learner import Learner
from tba.policy import Policy
from tba.tasks.quickstart_policy import make_model, make_tokenizer
from tba.types import Draw, Trajectory

READS, STEP_SECONDS = 40, 0.5
PERIODS = (2, 10)  # steps per sync
ARRIVING = 2  # shards per step
STORED = 1000  # shards that made-up rows stand for
MEMORY = 64 << 20
FIRST_SEARCHER = 100  # of made-up rows
PARTS = ("admit", "draw", "fetch", "collate")


class Step(NamedTuple):
    seconds: float
    stood: float  # of them, while the thread did not run


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**4, 10**5, 10**6, 10**7])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--work", type=Path, help="where the shards are made; of the system's choice if not given")
    parser.add_argument("--one", type=int, help="measure this size here, and print what is found as JSON")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.one:
        sys.setswitchinterval(SWITCH_SECONDS)
        with tempfile.TemporaryDirectory(dir=options.work) as work:
            print(json.dumps(measure(Path(work), options.one)))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    results = []
    for size in options.sizes:
        results.append(in_a_fresh_process(size, options.work))
        record = {"measured": f"{datetime.now(UTC):%Y-%m-%d}", **hardware(), "results": results}
        (options.out / "critical_path.json").write_text(json.dumps(record, indent=1) + "\n")
        (options.out / "critical_path.svg").write_text(chart(results))
    print(markdown(results))


def in_a_fresh_process(size: int, work: Path | None) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.critical_path", "--one", str(size)]
    command += ["--work", str(work)] if work else []
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])


def measure(work: Path, size: int) -> dict[str, Any]:
    reader = Reader(work, Filled(size, first_searcher=FIRST_SEARCHER))
    load = os.getloadavg()[0]
    return {"size": size, "load": load, "found": [reader.beside(name, k) for name in WORK for k in PERIODS]}


class Reader:
    """A trainer's reader over an index of many rows."""

    def __init__(self, work: Path, made: Filled):
        self.run, self.stored = filled(work, "read", make_round(prompts=5, responses=20), STORED)
        self.buffer = self.make_buffer(made)
        self.prompts, self.steps, self.arriving = made.prompts, made.steps, count(STORED)
        self.learner = make_learner()

    def make_buffer(self, made: Filled) -> DuckReplayBuffer:
        buffer = DuckReplayBuffer(
            self.run,
            seed=0,
            slots=SLOTS,
            responses=RESPONSES,
            recent_share=0.5,
            inv_temp=1.0,
            capacity=PER_PROMPT,
            sampler_sql=default_sampler(),
            attempt=claim_attempt(self.run).number,
            events=Events(self.run, "trainer", 1),
            memory_bytes=MEMORY,
        )
        buffer.index, buffer.applied = made.index, next(made.syncs) - 1
        buffer._steps[3] = 3  # the version that the stored trajectories cite
        buffer.arrivals.settle(shard.key for shard in self.stored)
        return buffer

    def beside(self, name: str, k: int) -> dict[str, Any]:
        """Steps with a reader beside them and steps without one, in pairs."""
        shards = [make_shards(self.run, self.arriving, ARRIVING * k, self.prompts) for _ in range(0, READS, k)]
        cores, work, found = os.sched_getaffinity(0), WORK[name](), list[tuple[str, float]]()
        turns, told = SimpleQueue[int | None](), SimpleQueue[str]()
        reader = threading.Thread(target=self.read, args=(shards, k, turns, told, found), daemon=True)
        reader.start()
        os.sched_setaffinity(0, {min(cores)})
        pairs: list[dict[bool, Step]] = []
        step_of(work)  # the first is slower
        for n in range(READS):
            pair: dict[bool, Step] = {}
            for reading in (n % 2 == 0, n % 2 == 1):
                if reading:
                    turns.put(n)
                    told.get(timeout=60)
                pair[reading] = step_of(work)
                if reading:
                    told.get(timeout=60)
            pairs.append(pair)
        turns.put(None)
        os.sched_setaffinity(0, cores)
        longer = [pair[True].seconds - pair[False].seconds for pair in pairs]
        stood = [pair[True].stood - pair[False].stood for pair in pairs]
        low, median, high = statistics.quantiles(longer, n=4)
        return {
            "work": name,
            "steps_per_sync": k,
            "step_ms": milliseconds(statistics.median(pair[False].seconds for pair in pairs)),
            "reading_ms": {part: milliseconds(sum(it for name, it in found if name == part) / READS) for part in PARTS},
            "longer_ms": {"median": milliseconds(median), "quartiles": [milliseconds(low), milliseconds(high)]},
            "longer_ms_mean": milliseconds(statistics.mean(longer)),
            "standing_ms": milliseconds(statistics.median(stood)),
            "loss_percent": round(100 * median / STEP_SECONDS, 2),
        }

    def read(
        self,
        arriving: Sequence[dict[str, bytes]],
        k: int,
        turns: "SimpleQueue[int | None]",
        told: "SimpleQueue[str]",
        found: list[tuple[str, float]],
    ) -> None:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

        @contextmanager
        def part(name: str) -> Iterator[None]:
            began = time.perf_counter()
            yield
            found.append((name, time.perf_counter() - began))

        while (n := turns.get()) is not None:
            for key, data in arriving[n // k].items() if n % k == 0 else ():
                (Path(self.run.url) / key).write_bytes(data)
            told.put("begins")
            step = next(self.steps)
            with part("admit"):
                if n % k == 0:
                    self.buffer.sync(self.buffer.applied + 1, step=step - 1)
            with part("draw"):
                draws = self.buffer.draw(step)
            with part("fetch"):
                trajectories = self.fetch(draws)
            named = [replace(row, prompt_id=draw.prompt_id) for row, draw in zip(trajectories, draws, strict=True)]
            with part("collate"):
                self.learner.collate(named)
            told.put("ends")

    def fetch(self, draws: Sequence[Draw]) -> list[Trajectory]:
        places = [draw.trajectory_id.split("/") for draw in draws]
        return self.buffer.payloads.fetch([(self.shard(int(a), int(b)), int(row)) for a, b, row in places])

    def shard(self, searcher: int, seq: int) -> Shard:
        """What a row that is made up stands for; others lie where the buffer says."""
        return self.buffer.shards.get(f"{searcher}/{seq}") or self.stored[(31 * seq + searcher) % STORED]


def make_shards(run: Run, numbers: Iterator[int], n: int, prompts: int) -> dict[str, bytes]:
    """Objects of the searchers' next shards, by key."""
    made: dict[str, bytes] = {}
    for number in islice(numbers, n):
        searcher, seq = number % SEARCHERS, number // SEARCHERS
        asked = np.random.default_rng(number).choice(prompts, 5, replace=False).tolist()
        rows = [
            replace(row, searcher=searcher, round=seq, prompt_id=f"train/{asked[row.slot // 20]}")
            for row in make_round(prompts=5, responses=20, searcher=number)
        ]
        made[layout.shard(searcher, seq)] = encode(to_table(rows, run=run.name, searcher=searcher, seq=seq))
    return made


# --- the work beside it -----------------------------------------------------------------------------------------------


def gradient_steps() -> Callable[[], Any]:
    learner, rows, tokens = make_learner(), SLOTS * RESPONSES, 62  # almost what quickstart's policy can read
    batch = Batch(
        tokens_BT=torch.randint(3, 15, (rows, tokens)),
        response_mask_BT=torch.arange(tokens).expand(rows, tokens) > 10,
        ref_logp_B=torch.full((rows,), -100.0),
        reward_B=torch.rand(rows),
        responses_per_prompt=RESPONSES,
        lengths=(tokens,) * rows,
    )
    return partial(learner.learn, 1, batch)


def make_learner() -> Learner:
    config = quickstart()
    search = replace(config.search, responses_per_prompt=RESPONSES)
    training = replace(
        config.training, prompts_per_step=SLOTS, responses_per_prompt=RESPONSES, groups_per_micro_batch=SLOTS
    )
    policy = Policy(make_model(0), make_tokenizer(), torch.device("cpu"))
    return Learner(replace(config, search=search, training=training), policy)


def small_products() -> Callable[[], Any]:
    """Half a second of products of a fifth of a millisecond each, between which the interpreter is asked for."""
    a = torch.rand(256, 256)

    def work() -> None:
        for _ in range(2000):
            torch.mm(a, a)

    return work


WORK = {"gradient steps": gradient_steps, "small products": small_products}


def step_of(work: Callable[[], Any]) -> Step:
    began, before = time.perf_counter(), time.thread_time()
    work()
    seconds = time.perf_counter() - began
    return Step(seconds, seconds - (time.thread_time() - before))


# --- what is said of it -----------------------------------------------------------------------------------------------


def milliseconds(seconds: float) -> float:
    return round(1e3 * seconds, 2)


def markdown(results: Sequence[dict[str, Any]]) -> str:
    header = [
        "trajectories",
        "beside",
        "k",
        *(f"{part}, ms" for part in PARTS),
        "a step is longer by, ms",
        "of 0.5 s, %",
    ]
    lines = [header, ["---:"] * len(header)]
    for result in results:
        for it in result["found"]:
            low, high = it["longer_ms"]["quartiles"]
            longer = f"{it['longer_ms']['median']} ({low} to {high})"
            read = [str(it["reading_ms"][part]) for part in PARTS]
            size, k = f"{result['size']:,}", str(it["steps_per_sync"])
            lines.append([size, it["work"], k, *read, longer, str(it["loss_percent"])])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def chart(results: Sequence[dict[str, Any]]) -> str:
    """Percent of a step against size."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        for it in result["found"]:
            name = f"beside {it['work']}, k = {it['steps_per_sync']}"
            lines.setdefault(name, []).append((math.log10(result["size"]), it["loss_percent"]))
    series = [Series(name, line, marked=True) for name, line in lines.items()]
    return picture(f"% of a {STEP_SECONDS} s step lost", series, x_name="log10 trajectories")


if __name__ == "__main__":
    main()
