"""Measure shards at growing numbers: the cost to append one, to find arrivals, to fetch responses and to resume.

    python -m benchmarks.shards [--sizes 100 1000 10000 100000] [--out FOLDER] [--work FOLDER]

`append`: a round of 512 trajectories of about 90 + 230 tokens is stored durably by `Trajectories.append`. For
comparison, `pyarrow.parquet.write_table` and fsync store the same rows: with default settings, with Parquet's usual
encodings and our compression, and with all of our settings.
`growth`: runs of eight searchers with small shards, of 100 trajectories of 16 tokens each.
`fetch`: 140 responses come from 140 shards, out of 10,000 shards of 100 usual trajectories on a local disk, and out of
1,000 on S3. S3 is Ceph's gateway on loopback if it is installed, else moto; neither has the latency of a network. Then
the same is measured on the first 1,000 shards in compactions.
`memory`: growth of a process that fetches more than its budget. All parts need 6 GB in the folder to work in.

Alternatives run in turn, in alternating order, in one process. Numbers are medians with quartiles.
"""

import argparse
import gc
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import servers
from benchmarks.harness.filled_runs import SEARCHERS, compacted, filled, forget_files, make_round, make_run
from benchmarks.harness.hardware import hardware
from benchmarks.harness.timing import bytes_read, in_turn, ratio, seconds_of, spread
from flows.pages.charts import Chart, Series
from storage import layout
from storage.buffer.arrivals import Arrivals
from storage.log import trajectories
from storage.log.payloads import Payloads
from storage.log.schema import COLUMNS, ENCODING, encode, to_table
from storage.log.shard_reader import ShardReader
from storage.log.sync_records import Shard
from storage.log.trajectories import Trajectories
from storage.runs.run import Run

PLAIN = {"compression": "zstd", "compression_level": 1}
REPEATS = 40
FETCHED = 140
ON_DISK, ON_S3 = 10_000, 1_000
BUDGET = 256 << 20


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**2, 10**3, 10**4, 10**5])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--work", type=Path, help="folder in which shards are made (default: the system's choice)")
    parser.add_argument("--memory", type=Path, help="measure only memory, on the run in this folder, and print JSON")
    options = parser.parse_args(arguments)
    if options.memory:
        print(json.dumps(resident_growth(options.memory)))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        result = {"measured": f"{datetime.now(UTC):%Y-%m-%d}", **hardware(), **measure(Path(work), options.sizes)}
    (options.out / "shards.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.out / "shards.svg").write_text(chart(result["growth"]))
    print(markdown(result))


def measure(work: Path, sizes: Sequence[int]) -> dict[str, Any]:
    result: dict[str, Any] = {"append": append(work), "growth": [growth(work, size) for size in sizes]}
    run, shards = filled(work, "usual", make_round(prompts=5, responses=20), ON_DISK)
    result["fetch"] = {"disk": fetch_from_disk(run, shards), **fetch_from_s3(work, shards[:ON_S3], run)}
    result["memory"] = in_a_fresh_process(run)
    run, shards = compacted(run, shards[:ON_S3])
    result["fetch"] |= {
        "disk, compacted": fetch_from_disk(run, shards),
        **{f"{kind}, compacted": it for kind, it in fetch_from_s3(work / "compacted", shards, run).items()},
    }
    shutil.rmtree(run.url)
    return result


# --- append -----------------------------------------------------------------------------------------------------------


def append(work: Path) -> dict[str, Any]:
    """Compare twice: from a list of trajectories to a file, and from their table to a file."""
    rows = make_round()
    run = make_run(work, "append")
    table, log = to_table(rows, run=run.name, searcher=0, seq=0), Trajectories(run)
    folder, numbers = work / "raw", count()
    folder.mkdir()

    def ours(made: pa.Table | None) -> None:
        made_once = patch.object(trajectories, "to_table", lambda *_, **__: made) if made else ExitStack()
        with made_once:
            log.append(0, next(numbers), rows)

    def raw(made: pa.Table | None, settings: Mapping[str, Any]) -> None:
        path = folder / f"{next(numbers)}.parquet"
        pq.write_table(made or to_table(rows, run=run.name, searcher=0, seq=0), path, **settings)
        flush(path)

    result: dict[str, Any] = {"rows": len(rows), "bytes": len(encode(table)), "to_table": spread(in_turn(REPEATS,
        {"to_table": lambda: to_table(rows, run=run.name, searcher=0, seq=0)})["to_table"])}  # fmt: skip
    for begun, made in (("trajectories", None), ("table", table)):
        seconds = in_turn(REPEATS, {
            "default": lambda made=made: raw(made, {}),
            "ours": lambda made=made: ours(made),
            "usual encodings": lambda made=made: raw(made, PLAIN),
            "our settings": lambda made=made: raw(made, ENCODING),
        })  # fmt: skip
        result[f"from {begun}"] = {
            **{name: spread(times) for name, times in seconds.items()},
            "rate / default": ratio(seconds["default"], seconds["ours"]),
            "rate / usual encodings": ratio(seconds["usual encodings"], seconds["ours"]),
            "rate / our settings": ratio(seconds["our settings"], seconds["ours"]),
        }
    shutil.rmtree(run.url)
    return result


def flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


# --- growth -----------------------------------------------------------------------------------------------------------


def growth(work: Path, size: int) -> dict[str, Any]:
    """Measure costs that grow with the number of stored and admitted shards, and costs that should not."""
    run, shards = filled(work, f"growth-{size}", make_round(prompts=5, responses=20, tokens=16), size)
    log, rows = Trajectories(run), make_round(searcher=0)
    settled = settled_arrivals(run, shards)
    appends, looks, folders, names = [], [], [], count(-(-size // SEARCHERS))
    for _ in range(REPEATS):
        seq = next(names)
        appends.append(seconds_of(lambda seq=seq: log.append(0, seq, rows)))
        looks.append(seconds_of(settled.look))
        folders.append(seconds_of(lambda: run.store.folders(layout.TRAJECTORIES)))
        settled.settle(list(settled.found))
    result = {
        "shards": size,
        "append": spread(appends),
        "look": spread(looks),
        "look_mean": round(statistics.fmean(looks), 5),
        "of which naming folders": spread(folders),
        "bytes in memory per shard": bytes_in_memory(run, shards),
        "resume": resume(run, shards),
    }
    shutil.rmtree(run.url)
    return result


def settled_arrivals(run: Run, shards: Sequence[Shard]) -> Arrivals:
    arrivals = Arrivals(run, Payloads(run, memory_bytes=0, disk_bytes=0), lambda table: None)
    arrivals.settle(shard.key for shard in shards)
    return arrivals


def bytes_in_memory(run: Run, shards: Sequence[Shard]) -> dict[str, float]:
    """Return the bytes in memory per shard: the buffer keeps where the shard is, and arrivals that it is settled."""
    tracemalloc.start()
    copies = {f"{it.searcher}/{it.seq}": Shard(**json.loads(json.dumps(vars(it)))) for it in shards}
    named = tracemalloc.get_traced_memory()[0]
    arrivals = settled_arrivals(run, shards)
    settled = tracemalloc.get_traced_memory()[0] - named
    tracemalloc.stop()
    del arrivals
    return {"buffer": round(named / len(copies), 1), "arrivals": round(settled / len(copies), 1)}


def resume(run: Run, shards: Sequence[Shard]) -> dict[str, float]:
    """Measure reading the light columns of every shard, with files dropped from the page cache."""
    forget_files(run, shards)
    reader, rows = ShardReader(run, disk_bytes=0), 0
    before, began = bytes_read(), time.perf_counter()
    for _, table in reader.light(shards, COLUMNS):
        rows += len(table)
    seconds = time.perf_counter() - began
    return {
        "seconds": round(seconds, 3),
        "milliseconds_per_shard": round(1e3 * seconds / len(shards), 3),
        "rows": rows,
        "bytes_read_per_shard": round((bytes_read() - before) / len(shards)),
        "bytes_per_shard": shards[0].bytes,
    }


# --- fetch ------------------------------------------------------------------------------------------------------------


def fetch_from_disk(run: Run, shards: Sequence[Shard]) -> dict[str, Any]:
    def cold(places: Sequence[tuple[Shard, int]]) -> float:
        forget_files(run, [shard for shard, _ in places])
        return seconds_of(lambda: no_memory().fetch(places))

    def no_memory() -> Payloads:
        return Payloads(run, memory_bytes=0, disk_bytes=0)

    warm = Payloads(run, memory_bytes=1 << 30, disk_bytes=0)
    seconds: dict[str, list[float]] = {"cold": [], "files in the system's memory": [], "warm": []}
    for places in batches(shards, REPEATS):
        seconds["cold"].append(cold(places))
        seconds["files in the system's memory"].append(seconds_of(lambda places=places: no_memory().fetch(places)))
        warm.fetch(places)
        seconds["warm"].append(seconds_of(lambda places=places: warm.fetch(places)))
    return {
        "shards": len(shards),
        "bytes": shards[0].bytes,
        **{name: spread(it) for name, it in seconds.items()},
        "resume_milliseconds_per_shard": resume(run, shards[:ON_S3])["milliseconds_per_shard"],
    }


def fetch_from_s3(work: Path, shards: Sequence[Shard], source: Run) -> dict[str, Any]:
    """Measure fetches of the same objects on S3: from the server, from copies on disk, and from memory."""
    work.mkdir(exist_ok=True)  # each server has its own
    with s3(work) as (kind, root):
        run = Run.create(root, source.name, config={}, sampler_sql="", code_version="benchmark")
        for shard in shards:
            if source.store.exists(shard.key):
                run.store.create(shard.key, source.store.read(shard.key))
        for entry in source.store.list(layout.COMPACTIONS):
            run.store.create(entry.key, source.store.read(entry.key))
        seconds: dict[str, list[float]] = {"cold": [], "from copies on disk": [], "warm": []}
        for places in batches(shards, REPEATS // 4):
            shutil.rmtree(work / "copies", ignore_errors=True)
            first, second = (Payloads(run, memory_bytes=1 << 30, disk_bytes=1 << 30) for _ in range(2))
            seconds["cold"].append(seconds_of(lambda places=places, it=first: it.fetch(places)))
            seconds["from copies on disk"].append(seconds_of(lambda places=places, it=second: it.fetch(places)))
            seconds["warm"].append(seconds_of(lambda places=places, it=second: it.fetch(places)))
        reader = ShardReader(run, disk_bytes=0)
        whole = seconds_of(lambda: list(reader.light(shards, COLUMNS)))
        result = {name: spread(it) for name, it in seconds.items()}
        return {kind: {"shards": len(shards), **result, "resume_milliseconds_per_shard": 1e3 * whole / len(shards)}}


@contextmanager
def s3(work: Path) -> Iterator[tuple[str, str]]:
    """Start a server, and yield its kind and a root on it. The environment leads to the server."""
    with ExitStack() as stack:
        server = stack.enter_context(servers.s3(work))
        stack.enter_context(patch.dict(os.environ, {**server.environment(), "TBA_CACHE": str(work / "copies")}))
        yield f"S3 ({'moto' if servers.lacking_for_ceph() else 'ceph'})", f"s3://{servers.BUCKET}/benchmark"


def batches(shards: Sequence[Shard], number: int) -> Iterator[list[tuple[Shard, int]]]:
    """Yield batches of rows, each row from another shard."""
    random = np.random.default_rng(1)
    for _ in range(number):
        chosen = random.choice(len(shards), FETCHED, replace=False)
        yield [(shards[place], int(random.integers(shards[place].rows))) for place in chosen]


# --- memory -----------------------------------------------------------------------------------------------------------


def in_a_fresh_process(run: Run) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.shards", "--memory", run.url]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])


def resident_growth(folder: Path) -> dict[str, Any]:
    run = Run.open(str(folder))
    shards = json.loads((folder / "shards.json").read_text())
    shards = [Shard(**shard) for shard in shards]
    Payloads(run, memory_bytes=0, disk_bytes=0).fetch(next(batches(shards, 1)))  # loads libraries
    before, payloads, peak = resident(), Payloads(run, memory_bytes=BUDGET, disk_bytes=0), 0
    for places in batches(shards, 30):
        payloads.fetch(places)
        peak = max(peak, resident())
    gc.collect()
    return {
        "budget": BUDGET,
        "counted": payloads.nbytes,
        "arrow": pa.total_allocated_bytes(),
        "resident_growth": resident() - before,
        "resident_growth_at_most": peak - before,
    }


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- the report -------------------------------------------------------------------------------------------------------


def markdown(result: Mapping[str, Any]) -> str:
    return "\n\n".join(
        [append_table(result["append"]), growth_table(result["growth"]), fetch_table(result), memory_line(result)]
    )


def append_table(found: Mapping[str, Any]) -> str:
    lines = [
        "| append of 512, ms | ours | raw, default | raw, usual encodings | raw, our settings | our rate to these |",
        "|---|---|---|---|---|---|",
    ]
    for begun in ("from trajectories", "from table"):
        it = found[begun]
        others = ("default", "usual encodings", "our settings")
        rates = ", ".join(f"{it[f'rate / {name}']['median']:.2f}" for name in others)
        cells = " | ".join(milliseconds(it[name]) for name in ("ours", *others))
        lines.append(f"| {begun} | {cells} | {rates} |")
    return "\n".join(lines)


def growth_table(found: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| shards stored | append, ms | look, ms | (mean) | naming folders, ms | bytes in memory per shard "
        "| resume, s | ms per shard |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for it in found:
        kept, resumed = it["bytes in memory per shard"], it["resume"]
        lines.append(
            f"| {it['shards']:,} | {milliseconds(it['append'])} | {milliseconds(it['look'])} "
            f"| {1e3 * it['look_mean']:.1f} | {milliseconds(it['of which naming folders'])} "
            f"| {kept['buffer']:.0f} + {kept['arrivals']:.1f} "
            f"| {resumed['seconds']:.2f} | {resumed['milliseconds_per_shard']:.2f} |"
        )
    return "\n".join(lines)


def chart(found: Sequence[Mapping[str, Any]]) -> str:
    """Return a chart of milliseconds against the number of stored shards."""
    lines = {
        "append": "append of 100 small",
        "look": "looking for one arrival",
        "of which naming folders": "naming folders",
    }
    series = [
        Series(label, [(math.log10(it["shards"]), 1e3 * it[name]["median"]) for it in found], marked=True)
        for name, label in lines.items()
    ]
    return Chart("milliseconds", series, x_name="log10 shards stored").picture()


def fetch_table(result: Mapping[str, Any]) -> str:
    lines = ["| 140 responses, ms | from | |", "|---|---|---|"]
    for place, found in result["fetch"].items():
        lines += [f"| {place} | {name} | {milliseconds(it)} |" for name, it in found.items() if isinstance(it, dict)]
        lines.append(f"| {place} | resume, per shard | {found['resume_milliseconds_per_shard']:.2f} |")
    return "\n".join(lines)


def memory_line(result: Mapping[str, Any]) -> str:
    it = {name: f"{value / 2**20:.0f} MiB" for name, value in result["memory"].items()}
    return (
        f"Budget {it['budget']}: {it['counted']} counted, {it['arrow']} by Arrow; the process grew by "
        f"{it['resident_growth']}, and by {it['resident_growth_at_most']} at most."
    )


def milliseconds(it: Mapping[str, Any]) -> str:
    low, high = it["quartiles"]
    return f"{1e3 * it['median']:.1f} ({1e3 * low:.1f}-{1e3 * high:.1f})"


if __name__ == "__main__":
    main()
