"""Measure the index of the replay buffer at growing sizes: time of a draw and an admission, and memory of a trajectory.

    python -m benchmarks.index [--sizes 10000 100000 1000000 10000000] [--out FOLDER]

Rows are made up. Each prompt has 100 trajectories that can be drawn. A sync brings 20 shards of 100 (20 responses to
each of 5 prompts), so from the first measured sync on, every row that enters displaces an older row. A draw is 7
prompts x 20 responses. Each size has one thread in a fresh process. For comparison, the same SQL runs in turn over a
plain DuckDB table of the same rows, and over the sampler's table `pool`. If TorchRL is installed, samples of 140 rows
from its buffers, which have no prompts, are measured too. The largest size needs 6 GB of memory.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from benchmarks.harness.hardware import hardware
from flows.pages.charts import Chart, Series
from storage.buffer.index import Index
from storage.buffer.sampler import default_sampler
from tba.config import SamplingConfig, TrainingConfig

SLOTS, RESPONSES, PER_PROMPT = 7, 20, 100
SHARDS, SYNC_PROMPTS, SEARCH_RESPONSES = 20, 100, 20
DRAWS, SCANS = 100, 20
SETTINGS = [(share, inv_temp) for share in (0.5, 0.0) for inv_temp in (0.0, 1.0)]
PERIODS = (2, 10)  # steps per sync

PLAIN = """
create table plain as select * exclude (trajectory_id) from pool;
create view named as select concat_ws('/', searcher, seq, row) as trajectory_id, * from plain;
"""
CANDIDATES = """
select turn, prompt_id, searcher, seq, row, reward, sync
from turns join plain using (prompt, prompt_id) where branch = 'prioritised'
"""


class Seconds(NamedTuple):
    wall: float
    cpu: float


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**4, 10**5, 10**6, 10**7])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--one", type=int, help="measure this size in this process, and print the result as JSON")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.one:
        print(json.dumps(measure(options.one)))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    results = []
    for size in options.sizes:
        results.append(in_a_fresh_process(size))
        record = {"measured": f"{datetime.now(UTC):%Y-%m-%d}", **hardware(), "results": results}
        (options.out / "index.json").write_text(json.dumps(record, indent=1) + "\n")
        (options.out / "index.svg").write_text(chart(results))
    print(markdown(results))


def in_a_fresh_process(size: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.index", "--one", str(size)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])


def measure(size: int) -> dict[str, Any]:
    made = Filled(size)
    return {
        "size": size,
        **made.filled,
        "draws": [made.draws(share, inv_temp, k) for k in PERIODS for share, inv_temp in SETTINGS],
        "scans": made.scans(),
        "torchrl": torchrl(size),
    }


# --- an index of many rows --------------------------------------------------------------------------------------------


class Filled:
    """An index in which `size` trajectories can be drawn."""

    def __init__(self, size: int, *, first_searcher: int = 0, max_age: int | None = None):
        self.first_searcher = first_searcher
        self.prompts = max(size // PER_PROMPT, SYNC_PROMPTS)
        self.random, self.syncs, self.step = np.random.default_rng(0), count(), 0
        self.index = make_index(max_age=max_age)
        self.admit(range(SYNC_PROMPTS))  # loads libraries
        self.index.draw(self.next_step())
        gc.collect()
        before, seconds = resident(), list[float]()
        for _ in range(PER_PROMPT // SEARCH_RESPONSES):
            order = self.random.permutation(self.prompts)
            for start in range(0, self.prompts, SYNC_PROMPTS):
                self.next_step()  # one version per record
                seconds.append(self.admit(order[start : start + SYNC_PROMPTS].tolist()).wall)
        gc.collect()
        self.filled = {
            "prompts": self.prompts,
            "rebuild_seconds": round(sum(seconds), 2),
            "bytes_per_trajectory": round((resident() - before) / size, 1),
        }

    def sync(self, prompts: Sequence[int]) -> tuple[int, list[tuple[str, pa.Table]]]:
        sync = next(self.syncs)
        each = len(prompts) // SHARDS
        parts = [prompts[start : start + each] for start in range(0, len(prompts), each)]
        names = [f"{searcher}/{sync}" for searcher in range(self.first_searcher, self.first_searcher + len(parts))]
        return sync, [(name, shard(self.random, part, self.step)) for name, part in zip(names, parts, strict=True)]

    def next_step(self) -> int:
        self.step += 1
        return self.step

    def admit(self, prompts: Sequence[int]) -> Seconds:
        sync, shards = self.sync(prompts)
        return seconds_of(lambda: self.index.extend(sync, shards, step=self.step))

    def some_prompts(self) -> list[int]:
        return self.random.choice(self.prompts, SYNC_PROMPTS, replace=False).tolist()

    def draws(self, share: float, inv_temp: float, k: int) -> dict[str, Any]:
        """Measure draws, with a sync every k steps."""
        self.index.parameters.update(recent_share=share, inv_temp=inv_temp)
        drawing, admitting = [], []
        for n in range(DRAWS):
            if n % k == 0:
                admitting.append(self.admit(self.some_prompts()))
            drawing.append(seconds_of(lambda: self.index.draw(self.next_step())))
        setting = {"recent_share": share, "inv_temp": inv_temp, "steps_per_sync": k}
        return {**setting, "draw_ms": spread(drawing), "admit_ms": spread(admitting)}

    def scans(self) -> dict[str, Any]:
        """Measure the same draws from the index, from a plain table of the same rows, and from `pool`, in turn."""
        con, by_pool = self.index.tables.con, self.over_pool()
        self.index.tables.lay("pool", self.index.pool.table())
        con.execute(PLAIN)
        plain = default_sampler().replace("join front", "join named as front")
        ways: dict[str, Callable[[dict[str, float]], Any]] = {
            "draw": lambda parameters: self.index.draw(int(parameters["step"])),
            "plain": lambda parameters: con.execute(plain, parameters).fetchall(),
            "candidates": lambda _: con.execute(CANDIDATES).fetchall(),
            "pool": lambda parameters: by_pool.draw(int(parameters["step"])),
        }
        seconds: dict[str, list[Seconds]] = {name: [] for name in ways}
        for index in (self.index, by_pool):
            index.parameters.update(recent_share=0.0, inv_temp=1.0)
        for n in range(SCANS):
            parameters = {**self.index.parameters, "step": self.next_step(), "newest": self.index.newest or 0}
            self.index.draw(int(parameters["step"]))  # fills the table `turns`, which the plain scans read
            for name in sorted(ways, reverse=n % 2 == 0):
                seconds[name].append(seconds_of(partial(ways[name], parameters)))
        return {f"{name}_ms": spread(it) for name, it in seconds.items()}

    def over_pool(self) -> Index:
        """Return the same index with a sampler that reads all of `pool`."""
        other = make_index(default_sampler().replace("join front", "join pool as front"))
        for name in ("pool", "prompts", "versions", "shards", "branches", "newest"):
            setattr(other, name, getattr(self.index, name))
        return other


def make_index(sampler_sql: str = "", *, max_age: int | None = None) -> Index:
    return Index(
        sampler_sql or default_sampler(),
        seed=0,
        sampling=SamplingConfig(inv_temp=1.0, capacity=PER_PROMPT, max_age=max_age),
        training=TrainingConfig(prompts_per_step=SLOTS, responses_per_prompt=RESPONSES),
        step_of_version=lambda version: version.number,
    )


def shard(random: np.random.Generator, prompts: Sequence[int], version: int) -> pa.Table:
    """Return a shard of random rows. The number of a version is the step that it follows."""
    rows = len(prompts) * SEARCH_RESPONSES
    hashes = random.bytes(16 * rows).hex()
    return pa.table(
        {
            "prompt_id": [f"train/{prompt}" for prompt in prompts for _ in range(SEARCH_RESPONSES)],
            "content_hash": [hashes[start : start + 32] for start in range(0, 32 * rows, 32)],
            "reward": random.random(rows),
            "length": random.integers(1, 400, rows, dtype=np.int32),
            "finished": random.random(rows) < 0.9,
            "version_start": np.full(rows, version, np.int32),
            "version_start_attempt": np.ones(rows, np.int32),
        }
    )


# --- comparisons ------------------------------------------------------------------------------------------------------


def torchrl(size: int) -> dict[str, Any]:
    """Measure, in TorchRL's buffers of `size` rows with similar columns, samples of as many rows as our batch has, and
    the arrival of as many rows as at our syncs. If TorchRL cannot be used, return only the reason."""
    try:
        from tensordict import TensorDict  # pyright: ignore[reportMissingImports]
        from torchrl.data import (  # pyright: ignore[reportMissingImports]
            LazyTensorStorage,
            PrioritizedSampler,
            RandomSampler,
            ReplayBuffer,
        )

        samplers = {"uniform": RandomSampler(), "prioritized": PrioritizedSampler(size, alpha=1.0, beta=1.0)}
    except (ImportError, RuntimeError) as error:
        print(f"TorchRL is left out: {error}", file=sys.stderr)
        return {"left_out": str(error)}
    numbers = {name: torch.zeros(size, dtype=torch.int32) for name in ("prompt", "shard", "row", "version", "length")}
    rows = TensorDict({**numbers, "reward": torch.rand(size)}, [size])
    found = {}
    for name, sampler in samplers.items():
        buffer = ReplayBuffer(storage=LazyTensorStorage(size), sampler=sampler, batch_size=SLOTS * RESPONSES)
        buffer.extend(rows)
        found[f"{name}_ms"] = spread([seconds_of(buffer.sample) for _ in range(DRAWS)])
        arriving = rows[: SYNC_PROMPTS * SEARCH_RESPONSES]
        found[f"{name}_extend_ms"] = spread([seconds_of(partial(buffer.extend, arriving)) for _ in range(SCANS)])
    return found


def seconds_of(work: Callable[[], Any]) -> Seconds:
    began, before = time.perf_counter(), time.process_time()
    work()
    return Seconds(time.perf_counter() - began, time.process_time() - before)


def spread(seconds: Sequence[Seconds]) -> dict[str, float]:
    """Return statistics of times in milliseconds: of wall-clock times, and as `cpu` the median CPU time, which other
    processes disturb less."""
    wall = sorted(it.wall for it in seconds)
    numbers = {
        "median": statistics.median(wall),
        "p95": wall[int(0.95 * (len(wall) - 1))],
        "max": wall[-1],
        "cpu": statistics.median(it.cpu for it in seconds),
    }
    return {name: round(1e3 * it, 2) for name, it in numbers.items()}


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- table and chart --------------------------------------------------------------------------------------------------


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """Return a table of draws with m = 0.5, inv_temp = 1 and a sync every 2 steps."""
    header = [
        "trajectories", "draw", "p95", "worst", "CPU", "admit 2000", "worst", "CPU", "scan, same SQL, CPU",
        "scan of candidates, CPU", "draw over `pool`, CPU", "bytes each",
        "rebuilt in", "TorchRL uniform", "prioritized",
    ]  # fmt: skip
    lines = [header, ["---:"] * len(header)]
    for it in results:
        draw, admit, rl = it["draws"][1]["draw_ms"], it["draws"][1]["admit_ms"], it["torchrl"]
        lines.append(
            [
                f"{it['size']:,}",
                *(f"{draw[name]} ms" for name in ("median", "p95", "max", "cpu")),
                *(f"{admit[name]} ms" for name in ("median", "max", "cpu")),
                *(f"{it['scans'][name]['cpu']} ms" for name in ("plain_ms", "candidates_ms", "pool_ms")),
                f"{it['bytes_per_trajectory']}",
                f"{it['rebuild_seconds']} s",
                *(f"{rl[name]['median']} ms" if name in rl else "-" for name in ("uniform_ms", "prioritized_ms")),
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def chart(results: Sequence[dict[str, Any]]) -> str:
    """Return a chart of CPU time against the number of trajectories."""
    lines: dict[str, Callable[[dict[str, Any]], float]] = {
        "a draw of 7 x 20": lambda it: it["draws"][1]["draw_ms"]["cpu"],
        "admission of 2000 rows": lambda it: it["draws"][1]["admit_ms"]["cpu"],
        "a plain scan for the same candidates": lambda it: it["scans"]["candidates_ms"]["cpu"],
    }
    points = {name: [(float(np.log10(it["size"])), value(it)) for it in results] for name, value in lines.items()}
    series = [Series(name, line, marked=True) for name, line in points.items()]
    return Chart("milliseconds of CPU time", series, x_name="log10 trajectories").picture()


if __name__ == "__main__":
    main()
