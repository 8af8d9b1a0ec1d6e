"""What a gradient step loses to all that reads for the next one, at growing numbers of trajectories.

    python -m benchmarks.critical_path [--sizes 10000 100000 1000000 10000000] [--out FOLDER] [--work FOLDER]

The reader of a trainer works beside its steps: it looks for arrivals and admits a record every k steps, draws 7 prompts
x 20 responses, fetches and collates them. Here it does so with the real buffer on a disk and on one core, beside steps
on another core; these are gradient steps of about half a second, of quickstart's policy, or as long a loop of small
matrix products, which no real step is as sensitive as. Steps are taken in threes, in changing order: alone; with the
reader in a thread, as a trainer has it; with the reader in a process of its own, which shares memory, caches and clock
with the step but no interpreter. What is said of the second, against the first: for how long the step's thread did not
run, which is the interpreter that it waits for, and by how much it took longer in all. By how much the third takes
longer is what any work on that machine's other core does to it.

Made-up rows fill the index, 100 per prompt; payloads are of real shards, of 100 trajectories (20 responses to each of 5
prompts) of about 90 + 230 tokens, of which 2 arrive per step. A drawn row that is made up stands for a row of one of
1000 such shards; memory holds few of them, so most are read from files. Each size has two processes
of its own; at the largest each takes 6 GB.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import count, islice, permutations, product
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.index import PER_PROMPT, RESPONSES, SLOTS, Filled, hardware
from benchmarks.shards import SEARCHERS, filled, make_round
from flows.charts import Series, picture
from flows.role import switch_soon
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
from tba.fetched import Fetched
from tba.learner import Learner
from tba.policy import Policy
from tba.tasks.quickstart_policy import make_model, make_tokenizer
from tba.timing import timed
from tba.types import Draw

READS, STEP_SECONDS = 60, 0.5
PERIODS = (2, 10)  # steps per sync
ARRIVING = 2  # shards per step
STORED = 1000  # shards that made-up rows stand for
MEMORY = 64 << 20
FIRST_SEARCHER = 100  # of made-up rows
PARTS = ("admit", "draw", "fetch", "collate")
ORDERS = tuple(permutations(("alone", "thread", "process")))


class Step(NamedTuple):
    seconds: float
    stood: float  # of them, while the thread did not run


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**4, 10**5, 10**6, 10**7])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--work", type=Path, help="where the shards are made; of the system's choice if not given")
    parser.add_argument("--one", type=int, help="measure this size here, and print what is found as JSON")
    parser.add_argument("--reader", type=int, help="read at this size here, when told to on standard input")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.one or options.reader:
        switch_soon()
        with tempfile.TemporaryDirectory(dir=options.work) as work:
            if options.one:
                print(json.dumps(measure(Path(work), options.one)))
            else:
                serve(Path(work), options.reader)
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
    out = subprocess.run(command("--one", size, work), check=True, stdout=subprocess.PIPE).stdout
    return json.loads(out.splitlines()[-1])


def command(what: str, size: int, work: Path | None) -> list[str]:
    own = [sys.executable, "-m", "benchmarks.critical_path", what, str(size)]
    return own + (["--work", str(work)] if work else [])


def measure(work: Path, size: int) -> dict[str, Any]:
    load, found = os.getloadavg()[0], []
    with in_a_process(work, size) as away, in_a_thread(work, size) as here:
        for name, k in product(WORK, PERIODS):
            found.append({"work": name, "steps_per_sync": k, **beside(WORK[name](), k, here, away)})
    return {"size": size, "load": load, "found": found}


# --- readers ----------------------------------------------------------------------------------------------------------


@dataclass
class Told:
    """A reader elsewhere: it is told what to do, and says when it begins and when it ends."""

    tell: Callable[[str], object]
    hear: Callable[[], str]

    def __call__(self, what: str) -> None:
        self.tell(what)
        if (said := self.hear()) != "begins":
            raise RuntimeError(f"the reader says {said!r}")

    def ends(self) -> dict[str, float]:
        """Seconds for each part."""
        return json.loads(self.hear())


@contextmanager
def in_a_thread(work: Path, size: int) -> Iterator[Told]:
    orders, said = SimpleQueue[str](), SimpleQueue[str]()
    reader = Reader(work, size)
    thread = threading.Thread(target=reader.listen, args=(iter(orders.get, ""), said.put), daemon=True)
    thread.start()
    yield Told(orders.put, partial(said.get, timeout=600))
    orders.put("")
    thread.join()


@contextmanager
def in_a_process(work: Path, size: int) -> Iterator[Told]:
    pipe = subprocess.PIPE
    with subprocess.Popen(command("--reader", size, work), stdin=pipe, stdout=pipe, text=True, bufsize=1) as process:
        assert process.stdin and process.stdout
        orders, said = process.stdin, process.stdout
        yield Told(lambda order: orders.write(f"{order}\n"), lambda: said.readline().strip())
        orders.close()


def serve(work: Path, size: int) -> None:
    Reader(work, size).listen(map(str.strip, sys.stdin), partial(print, flush=True))


class Reader:
    """A trainer's reader over an index of many rows."""

    def __init__(self, work: Path, size: int):
        made = Filled(size, first_searcher=FIRST_SEARCHER)
        self.run, self.stored = filled(work, f"read-{os.getpid()}", make_round(prompts=5, responses=20), STORED)
        self.buffer = self.make_buffer(made)
        self.prompts, self.steps, self.numbers = made.prompts, made.steps, count(STORED)
        self.arriving: list[dict[str, bytes]] = []
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

    def listen(self, orders: Iterable[str], say: Callable[[str], object]) -> None:
        """`make N K`: N rounds of arrivals, for syncs every K steps. `read`: what the next step needs, and `sync`: a
        record before it."""
        cores = os.sched_getaffinity(0)
        for order in orders:
            what, *numbers = order.split()
            if what == "make":
                rounds, k = map(int, numbers)
                self.arriving = [make_shards(self.run, self.numbers, ARRIVING * k, self.prompts) for _ in range(rounds)]
                say("begins")
                say("{}")
                continue
            os.sched_setaffinity(0, {max(cores)})
            if what == "sync":
                for key, data in self.arriving.pop().items():
                    (Path(self.run.url) / key).write_bytes(data)
            say("begins")
            say(json.dumps(self.read(sync=what == "sync")))

    def read(self, *, sync: bool) -> dict[str, float]:
        spent, step = dict[str, float](), next(self.steps)
        with timed(spent, "admit"):
            if sync:
                self.buffer.sync(self.buffer.applied + 1, step=step - 1)
        with timed(spent, "draw"):
            draws = self.buffer.draw(step)
        with timed(spent, "fetch"):
            fetched = self.fetch(draws)
        named = replace(fetched, prompt_ids=[draw.prompt_id for draw in draws])
        with timed(spent, "collate"):
            self.learner.collate(named)
        return spent

    def fetch(self, draws: Sequence[Draw]) -> Fetched:
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


# --- steps ------------------------------------------------------------------------------------------------------------


def beside(work: Callable[[], Any], k: int, here: Told, away: Told) -> dict[str, Any]:
    """Steps alone, beside the reader in a thread, and beside one in another process, in threes."""
    for reader in (here, away):
        reader(f"make {math.ceil(READS / k)} {k}")
        reader.ends()
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    threes: list[dict[str, Step]] = []
    reading: list[dict[str, float]] = []
    readers = {"alone": None, "thread": here, "process": away}
    step_of(work)  # the first is slower
    for n in range(READS):
        three: dict[str, Step] = {}
        for kind in ORDERS[n % len(ORDERS)]:
            if reader := readers[kind]:
                reader("sync" if n % k == 0 else "read")
            three[kind] = step_of(work)
            if reader:
                spent = reader.ends()
                reading += [spent] if kind == "thread" else []
        threes.append(three)
    os.sched_setaffinity(0, cores)
    standing = spread([it["thread"].stood - it["alone"].stood for it in threes])
    lost = spread([it["thread"].seconds - it["alone"].seconds for it in threes])
    return {
        "step_ms": milliseconds(statistics.median(it["alone"].seconds for it in threes)),
        "reading_ms": {part: milliseconds(statistics.mean(it.get(part, 0.0) for it in reading)) for part in PARTS},
        "lost_ms": lost,
        "other_process_ms": spread([it["process"].seconds - it["alone"].seconds for it in threes]),
        "beyond_other_process_ms": spread([it["thread"].seconds - it["process"].seconds for it in threes]),
        "standing_ms": standing,
        "standing_percent": round(standing["median"] / (10 * STEP_SECONDS), 2),
        "lost_percent": round(lost["median"] / (10 * STEP_SECONDS), 2),
    }


def spread(seconds: Sequence[float]) -> dict[str, Any]:
    """The median, between which it lies with 95 % probability, and the quartiles."""
    ordered, n = sorted(seconds), len(seconds)
    low, median, high = statistics.quantiles(ordered, n=4)
    reach = 0.98 * math.sqrt(n)
    within = ordered[max(0, math.floor(n / 2 - reach))], ordered[min(n - 1, math.ceil(n / 2 + reach))]
    return {
        "median": milliseconds(median),
        "within": [milliseconds(it) for it in within],
        "quartiles": [milliseconds(low), milliseconds(high)],
    }


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
        "a step stands still for, ms",
        "is longer by, ms",
        "% of 0.5 s",
        "beside another process by, ms",
    ]
    lines = [header, ["---:"] * len(header)]
    for result in results:
        for it in result["found"]:
            read = [str(it["reading_ms"][part]) for part in PARTS]
            standing, lost, other = (
                f"{it[name]['median']} ({it[name]['within'][0]} to {it[name]['within'][1]})"
                for name in ("standing_ms", "lost_ms", "other_process_ms")
            )
            where = [f"{result['size']:,}", it["work"], str(it["steps_per_sync"])]
            percent = f"{it['standing_percent']}, {it['lost_percent']}"
            lines.append([*where, *read, standing, lost, percent, other])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def chart(results: Sequence[dict[str, Any]]) -> str:
    """Percent of a step against size."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        for it in result["found"]:
            name = f"beside {it['work']}, k = {it['steps_per_sync']}"
            lines.setdefault(name, []).append((math.log10(result["size"]), it["standing_percent"]))
    series = [Series(name, line, marked=True) for name, line in lines.items()]
    return picture(f"% of a {STEP_SECONDS} s step that it stands still", series, x_name="log10 trajectories")


if __name__ == "__main__":
    main()
