"""Remembers which local files have been read whole, and the result: the sha256 of each, or whether it can be read.

A file is known by its path, inode, size and times of change. The results are kept in the cache folder, in one file for
each run, so that later processes read only what is new.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from storage.local_files.shared_cache import cache_folder
from storage.local_files.temporary_files import temporary_beside
from tba.errors import StorageError

MOST_BYTES = 2 * 1024**3
"""Bytes of files without a remembered result that one connection reads at most."""

_SIDE_BY_SIDE = 8  # files read at once
_SETTLED = 2.0  # seconds since the last change of a file: a later change within one tick of the clock would not show
_KEPT = 30 * 24 * 3600.0  # seconds for which the memories of a run stay when nobody asks for it

Reader = Callable[[Path], Any]
"""Reads a file whole and returns a result that JSON can hold."""


class RememberedReads:
    """The remembered results of one run. A cache folder that cannot be written costs time, and nothing else. `most` is
    the number of bytes of files without a remembered result that are read at most."""

    def __init__(self, run_url: str, *, most: int | None = None):
        self._left = MOST_BYTES if most is None else most
        self._remembered: dict[str, dict[str, Any]] = {}  # by path: the identity of a file, and what each reader told
        self._new = False
        self._file = _file_of(run_url)
        if self._file:
            with suppress(OSError, ValueError, TypeError):
                self._remembered = dict(json.loads(self._file.read_bytes()))

    def ask(self, kind: str, paths: Mapping[str, Path], reader: Reader) -> dict[str, Any]:
        """Return the results of a reader of this kind, by key. Files come oldest first. Files without a remembered
        result are read newest first, as far as the bound goes. Files beyond the bound, and files that do not exist,
        have no result."""
        told: dict[str, Any] = {}
        wanted: list[str] = []
        for key, path in reversed(list(paths.items())):
            try:
                about = path.stat()
            except OSError:
                continue
            known = self._known(path, about)
            if kind in known:
                told[key] = known[kind]
            elif about.st_size <= self._left:
                self._left -= about.st_size
                wanted.append(key)
        with ThreadPoolExecutor(_SIDE_BY_SIDE) as pool:
            for key, found in zip(wanted, pool.map(lambda key: _read(paths[key], reader), wanted), strict=True):
                if found is not None:
                    told[key], about = found
                    self._remember(kind, paths[key], about, told[key])
        return told

    def save(self) -> None:
        """Keep what is new for later processes."""
        if not self._new or not self._file:
            return
        temporary = temporary_beside(self._file)
        with suppress(OSError):
            try:
                temporary.write_text(json.dumps(self._remembered))
                os.replace(temporary, self._file)
            finally:
                temporary.unlink(missing_ok=True)
        self._new = False
        _forget_old(self._file.parent)

    def _known(self, path: Path, about: os.stat_result) -> dict[str, Any]:
        known = self._remembered.get(str(path))
        return known if isinstance(known, dict) and known.get("file") == _identity(about) else {}

    def _remember(self, kind: str, path: Path, about: os.stat_result, told: Any) -> None:
        if time.time() - max(about.st_mtime, about.st_ctime) < _SETTLED:
            return
        self._remembered[str(path)] = {**self._known(path, about), "file": _identity(about), kind: told}
        self._new = True


def _read(path: Path, reader: Reader) -> tuple[Any, os.stat_result] | None:
    """Return a reader's result and the file's status; None if the file is not there or was replaced meanwhile."""
    try:
        before = path.stat()
        told = reader(path)
        after = path.stat()
    except OSError:
        return None
    return (told, after) if _identity(before) == _identity(after) else None


def _identity(about: os.stat_result) -> list[int]:
    return [about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns]


def _file_of(run_url: str) -> Path | None:
    try:
        return cache_folder("verified") / f"{sha256(run_url.encode()).hexdigest()[:16]}.json"
    except StorageError:
        return None


def _forget_old(folder: Path) -> None:
    with suppress(OSError):
        for file in folder.iterdir():
            if time.time() - file.stat().st_mtime > _KEPT:
                file.unlink(missing_ok=True)
