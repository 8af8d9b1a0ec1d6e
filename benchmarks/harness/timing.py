"""Clocks, and how measured times are summed up."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def in_turn(repeats: int, works: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Return the seconds of each work. The works are repeated in turn, every other time in the reverse order."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(repeats):
        for name in list(works)[:: 1 if turn % 2 else -1]:
            seconds[name].append(seconds_of(works[name]))
    return seconds


def seconds_of(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def spread(seconds: Sequence[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(seconds, n=4)
    return {"median": round(median, 5), "quartiles": [round(low, 5), round(high, 5)]}  # pyright: ignore[reportReturnType]


def ratio(others: Sequence[float], ours: Sequence[float]) -> dict[str, Any]:
    return spread([other / our for other, our in zip(others, ours, strict=True)])


def bytes_read() -> int:
    """Return the bytes that this process has read from the disk."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))
