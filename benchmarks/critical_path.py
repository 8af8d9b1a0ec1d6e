"""Measure how much longer a gradient step takes while the next batch is read, at growing numbers of trajectories.

    python -m benchmarks.critical_path [--sizes 10000 100000 1000000 10000000] [--out FOLDER] [--work FOLDER]

While a trainer takes steps, its buffer process looks for arrivals and admits a record every k steps, and for each step
draws 7 prompts x 20 responses and fetches them. A thread of the trainer asks this process for the batch and collates
it. Here both do so with the real buffer on a local disk and on one core, while steps run on another core. A step is a
gradient step of the quickstart's policy of about half a second, or a loop of small matrix products of the same length,
which is more sensitive than any real step. Steps are taken in threes, in changing order: alone; with the buffer in its
process, as in a trainer; and with all of its work in a thread instead. The results compare the last two with the first:
how much longer a step takes, and for how long its thread did not run.

Made-up rows fill the index, 100 per prompt. Payloads come from real shards of 100 trajectories (20 responses to each of
5 prompts) of about 90 + 230 tokens, of which 2 arrive per step. A drawn made-up row stands for a row of one of 1000
such shards. Memory holds only few of them, so most are read from files. Each size has two processes, each with its own
index; at the largest size each process takes 6 GB.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import count, islice, permutations, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.harness.filled_runs import SEARCHERS, filled, make_round
from benchmarks.harness.hardware import hardware
from benchmarks.index import PER_PROMPT, RESPONSES, SLOTS, Filled
from flows.pages.charts import Chart, Series
from flows.roles import buffer_process
from flows.roles.buffer_process import BufferProcess, serve_buffer
from flows.roles.threads import switch_soon
from storage import layout
from storage.buffer.replay_buffer import DuckReplayBuffer
from storage.buffer.sampler import default_sampler
from storage.log.schema import encode, to_table
from storage.log.sync_records import Shard
from storage.runs.events import Events
from storage.runs.run import Run
from storage.weights.attempt_claim import claim_attempt
from tba.batches.batching import Batch
from tba.config import Config
from tba.interfaces import ReplayBuffer
from tba.models.policy import Policy
from tba.presets import preset
from tba.runtime.messages import take_pipes
from tba.runtime.waiting import timed
from tba.tasks.quickstart_policy import make_model, make_tokenizer
from tba.train.learner import Learner

COMMAND = [sys.executable, "-m", "benchmarks.critical_path"]
READS, STEP_SECONDS = 60, 0.5
PERIODS = (2, 10)  # steps per sync
ARRIVING = 2  # shards per step
STORED = 1000  # shards that made-up rows stand for
MEMORY = 64 << 20
FIRST_SEARCHER = 100  # of made-up rows: real shards have smaller numbers
PARTS = ("admit", "draw", "fetch", "collate")
KINDS = ("alone", "process", "thread")
ORDERS = tuple(permutations(KINDS))


class Step(NamedTuple):
    seconds: float
    stood: float  # seconds in which the thread did not run


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**4, 10**5, 10**6, 10**7])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--work", type=Path, help="folder in which shards are made (default: the system's choice)")
    parser.add_argument("--one", type=int, help="measure this size in this process, and print the result as JSON")
    parser.add_argument("--serve", type=int, help="run the buffer process of a run with this number of made-up rows")
    options, rest = parser.parse_known_args(arguments)
    if rest and not options.serve:
        parser.error(f"unknown arguments: {' '.join(rest)}")
    torch.set_num_threads(1)
    if options.serve:
        run = Run.open(rest[rest.index("--run") + 1])
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        serve_buffer(lambda: MadeUp(run, options.serve), *take_pipes())
    elif options.one:
        with tempfile.TemporaryDirectory(dir=options.work) as work:
            print(json.dumps(measure(Path(work), options.one)))
    else:
        measure_all(options)


def measure_all(options: argparse.Namespace) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    results = []
    for size in options.sizes:
        command = [*COMMAND, "--one", str(size), *(["--work", str(options.work)] if options.work else [])]
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
        results.append(json.loads(out.splitlines()[-1]))
        record = {"measured": f"{datetime.now(UTC):%Y-%m-%d}", **hardware(), "results": results}
        (options.out / "critical_path.json").write_text(json.dumps(record, indent=1) + "\n")
        (options.out / "critical_path.svg").write_text(chart(results))
    print(markdown(results))


def measure(work: Path, size: int) -> dict[str, Any]:
    load, rows, found = os.getloadavg()[0], make_round(prompts=5, responses=20), []
    runs = {kind: filled(work, kind, rows, STORED)[0] for kind in ("process", "thread")}
    switch_soon()
    buffer_process.COMMAND[:] = [*COMMAND, "--serve", str(size)]
    with BufferProcess(runs["process"], 1, 1, deadline=600) as apart:
        buffers: dict[str, ReplayBuffer] = {"process": apart, "thread": MadeUp(runs["thread"], size)}
        asking = {kind: Asking(runs[kind], buffer) for kind, buffer in buffers.items()}
        for name, k in product(WORK, PERIODS):
            found.append({"work": name, "steps_per_sync": k, **beside(WORK[name](), k, asking)})
    return {"size": size, "load": load, "found": found}


# --- buffers ----------------------------------------------------------------------------------------------------------


class MadeUp(DuckReplayBuffer):
    """A buffer of `size` made-up rows. Each of them stands for a row of a stored shard."""

    def __init__(self, run: Run, size: int):
        super().__init__(
            run,
            Config().replace(
                {
                    "sampling.inv_temp": 1.0,
                    "sampling.capacity": PER_PROMPT,
                    "training.prompts_per_step": SLOTS,
                    "training.responses_per_prompt": RESPONSES,
                    "search.responses_per_prompt": RESPONSES,
                    "search.initial_fill": SLOTS * RESPONSES,
                    "limits.memory_gb": MEMORY / 1e9,
                }
            ),
            sampler_sql=default_sampler(),
            attempt=claim_attempt(run).number,
            events=Events(run, "trainer", 1),
        )
        made = Filled(size, first_searcher=FIRST_SEARCHER)
        self.index, self.applied = made.index, next(made.syncs) - 1
        self.gradient_steps[3] = 3  # the version that the stored trajectories cite
        self.stored = [Shard(**it) for it in json.loads((Path(run.url) / "shards.json").read_text())]
        self.arrivals.settle(shard.key for shard in self.stored)
        start = {"sync": self.applied + 1, "step": made.next_step(), "prompts": made.prompts}
        (Path(run.url) / "start.json").write_text(json.dumps(start))

    def admitted_shard(self, name: str) -> Shard:
        searcher, seq = map(int, name.split("/"))
        return self.shards.get(name) or self.stored[(31 * seq + searcher) % STORED]


class Asking:
    """Imitates the trainer's background thread: for each step it gets a batch from the replay buffer and collates the
    batch."""

    def __init__(self, run: Run, buffer: ReplayBuffer):
        self.run, self.buffer = run, buffer
        buffer.waiting()  # waits until the process has started
        start = json.loads((Path(run.url) / "start.json").read_text())
        self.syncs, self.steps, self.prompts = count(start["sync"]), count(start["step"]), start["prompts"]
        self.numbers, self.arriving = count(STORED), list[dict[str, bytes]]()
        self.learner = make_learner()
        core = {max(os.sched_getaffinity(0))}
        self.thread = ThreadPoolExecutor(1, initializer=lambda: os.sched_setaffinity(0, core))

    def prepare(self, rounds: int, k: int) -> None:
        self.arriving = [make_shards(self.run, self.numbers, ARRIVING * k, self.prompts) for _ in range(rounds)]

    def begin(self, *, sync: bool) -> Future[dict[str, float]]:
        if sync:
            for key, data in self.arriving.pop().items():
                (Path(self.run.url) / key).write_bytes(data)
        return self.thread.submit(self.read, sync)

    def read(self, sync: bool) -> dict[str, float]:
        spent, step = dict[str, float](), next(self.steps)
        with timed(spent, "admit"):
            if sync:
                self.buffer.sync(next(self.syncs), step=step - 1)
        with timed(spent, "draw"):
            draws = self.buffer.draw(step)
        with timed(spent, "fetch"):
            fetched = self.buffer.fetch(draws)
        with timed(spent, "collate"):
            self.learner.collate(replace(fetched, prompt_ids=[draw.prompt_id for draw in draws]))
        return spent


def make_shards(run: Run, numbers: Iterator[int], n: int, prompts: int) -> dict[str, bytes]:
    """Return the next shards of the searchers, encoded, by key."""
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


def beside(work: Callable[[], Any], k: int, asking: Mapping[str, Asking]) -> dict[str, Any]:
    """Measure steps alone, and while each of the buffers works."""
    for it in asking.values():
        it.prepare(math.ceil(READS / k), k)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    taken: dict[str, list[Step]] = {kind: [] for kind in KINDS}
    spent: dict[str, list[dict[str, float]]] = {kind: [] for kind in asking}
    step_of(work)  # the first step is slower
    for n in range(READS):
        for kind in ORDERS[n % len(ORDERS)]:
            reading = asking[kind].begin(sync=n % k == 0) if kind in asking else None
            taken[kind].append(step_of(work))
            if reading:
                spent[kind].append(reading.result(60))
    os.sched_setaffinity(0, cores)
    alone = taken["alone"]
    found: dict[str, Any] = {"step_ms": milliseconds(statistics.median(it.seconds for it in alone))}
    for kind in asking:
        pairs = list(zip(taken[kind], alone, strict=True))
        found[kind] = {
            "reading_ms": {part: milliseconds(statistics.mean(it[part] for it in spent[kind])) for part in PARTS},
            "longer_ms": spread([it.seconds - other.seconds for it, other in pairs]),
            "standing_ms": spread([it.stood - other.stood for it, other in pairs]),
        }
    return found


def spread(seconds: Sequence[float]) -> dict[str, Any]:
    """Return the median with its 95 % confidence interval, and the quartiles, in milliseconds."""
    ordered, n = sorted(seconds), len(seconds)
    low, median, high = statistics.quantiles(ordered, n=4)
    reach = 0.98 * math.sqrt(n)
    within = ordered[max(0, math.floor(n / 2 - reach))], ordered[min(n - 1, math.ceil(n / 2 + reach))]
    return {
        "median": milliseconds(median),
        "within": [milliseconds(it) for it in within],
        "quartiles": [milliseconds(low), milliseconds(high)],
    }


# --- what a step computes ---------------------------------------------------------------------------------------------


def gradient_steps() -> Callable[[], Any]:
    learner, rows, tokens = make_learner(), SLOTS * RESPONSES, 62  # almost the longest row for its policy
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
    config = preset("quickstart")
    search = replace(config.search, responses_per_prompt=RESPONSES)
    training = replace(
        config.training, prompts_per_step=SLOTS, responses_per_prompt=RESPONSES, groups_per_micro_batch=SLOTS
    )
    policy = Policy(make_model(0), make_tokenizer(), torch.device("cpu"))
    return Learner(replace(config, search=search, training=training), policy)


def small_products() -> Callable[[], Any]:
    """Return work of half a second: products of 0.2 ms each. Between them, the thread has to acquire the interpreter
    lock."""
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


# --- table and chart --------------------------------------------------------------------------------------------------


def milliseconds(seconds: float) -> float:
    return round(1e3 * seconds, 2)


def markdown(results: Sequence[dict[str, Any]]) -> str:
    header = [
        "trajectories", "beside", "k", *(f"{part}, ms" for part in PARTS), "a step is longer by, ms", "of 0.5 s, %",
        "stands still, ms", "longer without the process, ms",
    ]  # fmt: skip
    lines = [header, ["---:"] * len(header)]
    for result in results:
        for it in result["found"]:
            ours, other = it["process"], it["thread"]
            lines.append(
                [
                    f"{result['size']:,}",
                    it["work"],
                    str(it["steps_per_sync"]),
                    *(str(ours["reading_ms"][part]) for part in PARTS),
                    within(ours["longer_ms"]),
                    str(percent(ours["longer_ms"])),
                    within(ours["standing_ms"]),
                    within(other["longer_ms"]),
                ]
            )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def within(it: dict[str, Any]) -> str:
    low, high = it["within"]
    return f"{it['median']} ({low} to {high})"


def percent(it: dict[str, Any]) -> float:
    return round(it["median"] / (10 * STEP_SECONDS), 2)


def chart(results: Sequence[dict[str, Any]]) -> str:
    """Return a chart of the slow-down of a step, in percent, against the number of trajectories."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        for it in result["found"]:
            name = f"beside {it['work']}, k = {it['steps_per_sync']}"
            lines.setdefault(name, []).append((math.log10(result["size"]), percent(it["process"]["longer_ms"])))
    series = [Series(name, line, marked=True) for name, line in lines.items()]
    return Chart(f"% by which a {STEP_SECONDS} s step is longer", series, x_name="log10 trajectories").picture()


if __name__ == "__main__":
    main()
