"""Measure how fast bytes move: between main memory and the GPU, on the GPU, and to and from the disk.

python -m benchmarks.gpu_check.bandwidths [--out FOLDER] [--small]
"""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check import stage

REPEATS = 3


def measure(small: bool) -> dict[str, Any]:
    size, found = 2**22 if small else 2**30, dict[str, float]()
    plain = torch.ones(size, dtype=torch.uint8)
    if torch.cuda.is_available():
        there, pinned = plain.cuda(), plain.pin_memory()
        found |= {
            "to the GPU, pageable": rate(size, lambda: there.copy_(plain)),
            "to the GPU, pinned": rate(size, lambda: there.copy_(pinned, non_blocking=True)),
            "from the GPU, pageable": rate(size, lambda: plain.copy_(there)),
            "from the GPU, pinned": rate(size, lambda: pinned.copy_(there, non_blocking=True)),
            "on the GPU": rate(2 * size, there.clone),  # read and written
        }
    found["in main memory"] = rate(2 * size, plain.clone)
    with tempfile.TemporaryDirectory() as folder:
        path, content = Path(folder) / "file", plain.numpy().tobytes()
        found["to the disk"] = rate(size, lambda: write(path, content))
        found["from the disk or its cache"] = rate(size, path.read_bytes)
    return {"gigabytes_per_second": {name: round(it / 1e9, 2) for name, it in found.items()}}


def rate(size: int, move: Callable[[], object]) -> float:
    """Return the bytes per second of the fastest of several moves."""
    seconds = []
    for _ in range(REPEATS):
        stage.finish()
        began = time.perf_counter()
        move()
        stage.finish()
        seconds.append(time.perf_counter() - began)
    return size / min(seconds)


def write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


if __name__ == "__main__":
    stage.run("bandwidths", __doc__, measure)
