"""How much of the weights changes between two versions, and how small a delta between them would be.

    python -m benchmarks.deltas RUN … [--dtype bfloat16] [--distances 1 2 5 10]

Each RUN has published versions in float32, the more consecutive ones the better: from each follows what it would have
published in `dtype`. Two kinds of delta are made of versions that are so many numbers apart: the places of the weights
that changed with their new values (4 bytes and one weight each), and the XOR of both versions' bits in zstd. Sizes are
relative to that of the version; the time to make the second, and to apply it, to that of one sha256 of the version, the
least of several taken in turn.
"""

import argparse
import hashlib
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import load_file

import storage
from storage import layout
from tba.pretrained import DTYPES
from tba.types import Version

TRIES = 7
BITS = {2: np.uint16, 4: np.uint32}  # by bytes of a weight
PUBLISHED = "select version, attempt, step from versions where state = 'kept' and not abandoned order by all"


class Found(NamedTuple):
    changed: float
    places: float
    xor: float
    making: float
    applying: float


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--distances", type=int, nargs="+", default=[1, 2, 5, 10])
    parser.add_argument("--pairs", type=int, default=8, help="at most, of each distance")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
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
    """By number, all weights of a version as bits, one after the other; and the step it follows."""
    found: dict[int, np.ndarray] = {}
    with storage.connect(url) as con:
        published = con.execute(PUBLISHED).fetchall()
    for number, attempt, _ in published:
        folder = Path(url) / layout.version(Version(number, attempt))
        tensors = {name: it for path in folder.glob("*.safetensors") for name, it in load_file(path).items()}
        together = torch.cat([tensors[name].flatten().to(dtype) for name in sorted(tensors)])
        found[number] = together.view(torch.uint8).numpy().view(BITS[dtype.itemsize])
    return found, {number: step for number, _, step in published}


def compare(before: np.ndarray, after: np.ndarray) -> Found:
    changed = int(np.count_nonzero(before != after))
    delta = xor_delta(before, after)
    assert np.array_equal(apply(before, delta), after)
    unit, making, applying = fastest(
        lambda: hashlib.sha256(after.data).digest(),
        lambda: xor_delta(before, after),
        lambda: apply(before, delta),
    )
    return Found(
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


def fastest(*works: Callable[[], object]) -> list[float]:
    """Seconds of each."""
    least = [float("inf")] * len(works)
    for _ in range(TRIES):
        for place, work in enumerate(works):
            began = time.perf_counter()
            work()
            least[place] = min(least[place], time.perf_counter() - began)
    return least


if __name__ == "__main__":
    main()
