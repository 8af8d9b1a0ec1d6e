"""Remembers the result of reading each local file whole: its sha256, or what is wrong with it.

A file counts as unchanged if its path, inode, size and times of change are the same. The results are kept in the cache
folder, in one file for each run, so that later processes read only new files.
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
"""Default of the maximum: how many bytes of files without a remembered result one `RememberedReads` reads."""

_SIDE_BY_SIDE = 8  # number of files that are read at the same time
SETTLED_SECONDS = 2.0  # a file that changed so recently is not remembered, as one more change might not be noticed
_KEPT = 30 * 24 * 3600.0  # seconds after which the results of a run are removed if no new result was added

Reader = Callable[[Path], Any]
"""Reads a file whole and returns a result that JSON can hold."""


class RememberedReads:
    """The remembered results of one run. If the cache folder cannot be written, nothing is remembered and later
    processes read the files again. All calls of `ask` together read at most `most` bytes of files that have no
    remembered result; a file that would exceed this limit gets no result."""

    def __init__(self, run_url: str, *, most: int | None = None):
        self._left = MOST_BYTES if most is None else most
        self._remembered: dict[str, dict[str, Any]] = {}  # by path: the identity of a file, and the result of each kind
        self._new = False
        self._file = _file_of(run_url)
        if self._file:
            with suppress(OSError, ValueError, TypeError):
                self._remembered = dict(json.loads(self._file.read_bytes()))

    def ask(self, kind: str, paths: Mapping[str, Path], reader: Reader) -> dict[str, Any]:
        """Return, by key, the results of this kind. `paths` has the path of each key, oldest file first. Files without
        a remembered result are read by `reader`, newest first, as long as the limit `most` allows. Files that would
        exceed the limit, and files that do not exist, get no result."""
        results: dict[str, Any] = {}
        wanted: list[str] = []
        for key, path in reversed(list(paths.items())):
            try:
                about = path.stat()
            except OSError:
                continue
            known = self._known(path, about)
            if kind in known:
                results[key] = known[kind]
            elif about.st_size <= self._left:
                self._left -= about.st_size
                wanted.append(key)
        with ThreadPoolExecutor(_SIDE_BY_SIDE) as pool:
            for key, read in zip(wanted, pool.map(lambda key: _read(paths[key], reader), wanted), strict=True):
                if read is not None:
                    results[key], about = read
                    self._remember(kind, paths[key], about, results[key])
        return results

    def save(self) -> None:
        """Store new results for later processes. If the cache folder cannot be written, do nothing."""
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

    def _remember(self, kind: str, path: Path, about: os.stat_result, result: Any) -> None:
        if time.time() - max(about.st_mtime, about.st_ctime) < SETTLED_SECONDS:
            return
        self._remembered[str(path)] = {**self._known(path, about), "file": _identity(about), kind: result}
        self._new = True


def _read(path: Path, reader: Reader) -> tuple[Any, os.stat_result] | None:
    """Return the reader's result and the file's status; None if the file does not exist or was changed while it was
    read."""
    try:
        before = path.stat()
        result = reader(path)
        after = path.stat()
    except OSError:
        return None
    return (result, after) if _identity(before) == _identity(after) else None


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
