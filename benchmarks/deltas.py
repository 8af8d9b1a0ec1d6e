"""Measure what share of the weights changes between two versions, and how small a delta between them would be.

    python -m benchmarks.deltas RUN … [--dtype bfloat16] [--distances 1 2 5 10]
    python -m benchmarks.deltas [--megabytes 60] [--rates 1e-6 1e-5 1e-4]

Each RUN has published versions in float32, preferably consecutive ones. They are converted to `dtype`, the dtype in
which the run might have published them. Two kinds of delta are made between versions whose numbers are `--distances`
apart: the positions of the changed weights with their new values (4 bytes plus one weight each), and the XOR of the
bits of both versions, compressed with zstd. Sizes are relative to the size of a version. The times to make and to apply
the XOR delta are relative to one sha256 of the version; each time is the fastest of several, taken in turn.

Without a RUN, versions of random bfloat16 weights are stored on an S3 server on this machine (rclone) and fetched from
it, in turn as whole versions and as differences from the first version. Each version is a step of about `rate` from the
version before. The table shows medians; a ratio is the median of the ratios of the pairs. A fetch verifies all
checksums and finds the base in the cache.
"""

import argparse
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import load_file

import storage
from benchmarks.harness import servers
from storage import layout
from storage.objects import manifest_folders
from storage.objects.open_store import open_store
from storage.runs.run import Run
from storage.weights.versions import Versions
from tba.models.pretrained import DTYPES
from tba.types import Version

TRIES = 7
BITS = {2: np.uint16, 4: np.uint32}  # by bytes of a weight
PUBLISHED = "select version, attempt, step from versions where state = 'kept' and not abandoned order by all"


class Comparison(NamedTuple):
    changed: float
    places: float
    xor: float
    making: float
    applying: float


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="RUN")
    parser.add_argument("--megabytes", type=int, default=60)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4])
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--distances", type=int, nargs="+", default=[1, 2, 5, 10])
    parser.add_argument("--pairs", type=int, default=8, help="largest number of pairs compared for each distance")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if not options.runs:
        travel(options.megabytes, options.rates)
        return
    print(
        "| run | steps apart | changed | places and values | XOR, zstd | making | applying |\n" + "|---|" + "---:|" * 6
    )
    for url in options.runs:
        versions, steps = weights(url, DTYPES[options.dtype])
        for distance in options.distances:
            starts = [n for n in versions if n + distance in versions]
            chosen = starts[:: -(-len(starts) // options.pairs)] if starts else []
            found = [compare(versions[n], versions[n + distance]) for n in chosen]
            if found:
                apart = statistics.median(steps[n + distance] - steps[n] for n in chosen)
                medians = (f"{statistics.median(column):.3f}" for column in zip(*found, strict=True))
                print("|", " | ".join([url.rpartition("/")[2], f"{apart:g}", *medians]), "|", flush=True)


def weights(url: str, dtype: torch.dtype) -> tuple[dict[int, np.ndarray], dict[int, int]]:
    """Return two mappings by version number: the weights of each kept version as one array of unsigned integers that
    hold their bits, and the gradient step after which the version was published."""
    found: dict[int, np.ndarray] = {}
    with storage.connect(url) as con:
        published = con.execute(PUBLISHED).fetchall()
    for number, attempt, _ in published:
        folder = Versions(Run.open(url)).load(Version(number, attempt))
        tensors = {name: it for path in folder.glob("*.safetensors") for name, it in load_file(path).items()}
        together = torch.cat([tensors[name].flatten().to(dtype) for name in sorted(tensors)])
        found[number] = together.view(torch.uint8).numpy().view(BITS[dtype.itemsize])
    return found, {number: step for number, _, step in published}


def compare(before: np.ndarray, after: np.ndarray) -> Comparison:
    changed = int(np.count_nonzero(before != after))
    delta = xor_delta(before, after)
    assert np.array_equal(apply(before, delta), after)
    unit, making, applying = fastest(
        lambda: hashlib.sha256(after.data).digest(),
        lambda: xor_delta(before, after),
        lambda: apply(before, delta),
    )
    return Comparison(
        changed / len(after),
        changed * (4 + after.itemsize) / after.nbytes,
        len(delta) / after.nbytes,
        making / unit,
        applying / unit,
    )


def xor_delta(before: np.ndarray, after: np.ndarray) -> bytes:
    return pa.compress(before ^ after, codec="zstd", asbytes=True)


def apply(before: np.ndarray, delta: bytes) -> np.ndarray:
    return np.frombuffer(pa.decompress(delta, before.nbytes, codec="zstd"), before.dtype) ^ before


def travel(megabytes: int, rates: Sequence[float]) -> None:
    print("| a step | changed | stored | publish whole, s | ratio | fetch whole, s | ratio |\n" + "|---|" + "---:|" * 6)
    with tempfile.TemporaryDirectory() as name, servers.rclone(Path(name)) as server:
        os.environ.update(server.environment() | {"TBA_CACHE": f"{name}/cache"})
        for rate in rates:
            found = list(there_and_back(Path(name) / f"{rate:g}", megabytes * 10**6 // 2, rate))
            medians = [statistics.median(column) for column in zip(*found, strict=True)]
            print(f"| {rate:g} |", " | ".join(f"{it:.3f}" for it in medians), "|", flush=True)


def there_and_back(folder: Path, count: int, rate: float) -> Iterator[tuple[float, ...]]:
    """Yield six numbers for each pair of versions: the share of weights that changed, the size of the stored difference
    relative to a whole version, the seconds to publish a whole version, the time to publish the difference relative to
    these seconds, and the same two numbers for a fetch."""
    store, chance = open_store(f"s3://{servers.BUCKET}/{rate:g}"), np.random.default_rng(0)
    weights, files = torch.from_numpy(chance.normal(0.0, 0.06, count).astype(np.float32)), list[Path]()
    for number in range(TRIES):
        files.append(folder / str(number) / "model.safetensors")
        files[-1].parent.mkdir(parents=True)
        files[-1].write_bytes(weights.to(torch.bfloat16).view(torch.uint8).numpy().data)
        weights += torch.from_numpy(chance.normal(0.0, rate, count).astype(np.float32))
    base = Version(0, 1)
    manifest_folders.publish(store, layout.version(base), files[0].parent, {})
    manifest_folders.local_copy(store, layout.version(base))
    for number, (before, file) in enumerate(pairwise(files), start=1):
        old, new = (np.fromfile(it, np.uint16) for it in (before, file))
        seconds = dict[str, float]()
        for kind, attempt, of in (("whole", 1, None), ("difference", 2, (str(base), files[0].parent))):
            prefix = layout.version(Version(number, attempt))
            began = time.perf_counter()
            manifest = manifest_folders.publish(store, prefix, file.parent, {}, base=of)
            seconds[f"publish {kind}"] = time.perf_counter() - began
            began = time.perf_counter()
            manifest_folders.fetch(store, prefix, folder / kind / str(number))
            seconds[f"fetch {kind}"] = time.perf_counter() - began
        stored = sum(it["bytes"] for it in manifest_folders.stored_files(manifest)) / file.stat().st_size
        yield (
            np.count_nonzero(old != new) / len(new), stored,
            seconds["publish whole"], seconds["publish difference"] / seconds["publish whole"],
            seconds["fetch whole"], seconds["fetch difference"] / seconds["fetch whole"],
        )  # fmt: skip


def fastest(*works: Callable[[], object]) -> list[float]:
    """Return the seconds of the fastest try of each work."""
    least = [float("inf")] * len(works)
    for _ in range(TRIES):
        for place, work in enumerate(works):
            began = time.perf_counter()
            work()
            least[place] = min(least[place], time.perf_counter() - began)
    return least


if __name__ == "__main__":
    main()
