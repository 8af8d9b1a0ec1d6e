"""Keeps copies of data from a remote store as local files, within a budget of bytes. Copies of whole objects are named
by the sha256 of their content; data that was made from a part of an object is named by its origin.

Processes and runs share the copies. A copy that was removed or changed counts as missing.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from threading import Lock

from storage.local_files.shared_cache import cache_folder
from storage.local_files.temporary_files import A_DAY, remove_left_behind, temporary_beside

log = logging.getLogger(__name__)

_DIGEST = 32  # bytes of a sha256
_SPARED = 0.9  # share of the limit that stays when copies are removed, so that not every new copy removes an old one


class Copies:
    """The copies of one kind. If a new copy makes them larger than `limit` bytes, the copies used longest ago are
    removed. If `limit` is 0, nothing is kept. Safe to use from several threads."""

    def __init__(self, kind: str, limit: int):
        self.kind, self.limit = kind, limit
        self._nbytes: int | None = None  # bytes of all copies, as far as this process knows
        self._counting = Lock()

    def read(self, digest: str) -> bytes | None:
        """Return the content with this sha256 if there is a copy, else None."""
        data = self._read(digest)
        return data if data is not None and sha256(data).hexdigest() == digest else None

    def read_made(self, name: str) -> bytes | None:
        """Return what `keep_made` has stored under this name, or None if it is missing or was changed. The sha256 at
        the start of the file reveals a change."""
        data = self._read(name)
        if data is None or sha256(content := data[_DIGEST:]).digest() != data[:_DIGEST]:
            return None
        return content

    def _read(self, name: str) -> bytes | None:
        if not self.limit:
            return None
        path = cache_folder(self.kind) / name
        try:
            data = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        return data

    def keep_made(self, name: str, data: bytes) -> None:
        self.keep(name, sha256(data).digest() + data)

    def keep(self, name: str, data: bytes) -> None:
        """Store a copy under a name, unless it is larger than the limit. If it cannot be written, for example because
        the disk is full, only log a warning."""
        if len(data) > self.limit:
            return
        path = cache_folder(self.kind) / name
        unfinished = temporary_beside(path)
        try:
            unfinished.write_bytes(data)
            os.replace(unfinished, path)
        except OSError as error:
            log.warning("cannot keep a copy at %s: %s", path, error.strerror or error)
            return
        finally:
            unfinished.unlink(missing_ok=True)
        with self._counting:
            self._nbytes = self._counted() if self._nbytes is None else self._nbytes + len(data)
            if self._nbytes > self.limit:
                self._nbytes = self._forget()

    def _counted(self) -> int:
        """Return the bytes of all copies. Also remove unfinished files that killed processes left more than a day
        ago."""
        return sum(size for _, size, path in self._all() if not remove_left_behind(Path(path), A_DAY))

    def _forget(self) -> int:
        """Remove the copies that were used longest ago. Return the number of bytes that stay."""
        oldest_first = sorted(self._all())
        nbytes = sum(size for _, size, _ in oldest_first)
        for _, size, path in oldest_first:
            if nbytes <= _SPARED * self.limit:
                break
            with suppress(FileNotFoundError):  # another process has just removed the copy
                os.unlink(path)
            nbytes -= size
        return nbytes

    def _all(self) -> Iterator[tuple[float, int, str]]:
        """Yield the time of the last use, the size and the path of each copy, and of each unfinished file."""
        with os.scandir(cache_folder(self.kind)) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    status = entry.stat()
                    yield status.st_mtime, status.st_size, entry.path
