"""Counts the bytes that this process hashes, reads, writes and maps. Call `install` before the modules that do so are
imported, as they import the functions by name."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_lock = threading.Lock()
_totals = {"hashed": 0, "mapped": 0}


@dataclass
class Counts:
    """The bytes of one stage."""

    hashed: int = 0
    """Bytes that went into a sha256."""
    read: int = 0
    """Bytes that system calls read, from the disk or from its cache in memory."""
    written: int = 0
    """Bytes that system calls wrote. A link writes none."""
    mapped: int = 0
    """Bytes of files that were mapped into memory with NumPy, all of which are read there."""


class _Sha256:
    """A sha256 that counts what goes into it."""

    def __init__(self, data: Any = b""):
        self._real = _real_sha256(data)
        _add("hashed", memoryview(data).nbytes)

    def update(self, data: Any) -> None:
        self._real.update(data)
        _add("hashed", memoryview(data).nbytes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


_real_sha256, _real_file_digest, _real_memmap = hashlib.sha256, hashlib.file_digest, np.memmap


def install() -> None:
    def file_digest(file: Any, kind: Any) -> Any:
        result = _real_file_digest(file, kind)
        _add("hashed", file.tell())
        return result

    def memmap(*arguments: Any) -> Any:
        result = _real_memmap(*arguments)
        _add("mapped", result.nbytes)
        return result

    hashlib.sha256, hashlib.file_digest, np.memmap = _Sha256, file_digest, memmap  # pyright: ignore


@contextmanager
def counting() -> Iterator[Counts]:
    """Yield counts that are complete once the `with` block has ended."""
    counts, before, (read, written) = Counts(), dict(_totals), _moved()
    yield counts
    counts.hashed, counts.mapped = (_totals[name] - before[name] for name in ("hashed", "mapped"))
    read_after, written_after = _moved()
    counts.read, counts.written = read_after - read, written_after - written


def _moved() -> tuple[int, int]:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"]), int(lines["wchar"])


def _add(name: str, nbytes: int) -> None:
    with _lock:
        _totals[name] += nbytes
