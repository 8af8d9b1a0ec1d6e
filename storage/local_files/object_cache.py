"""Copies of what a remote store gave as files on this machine, within a budget of bytes: objects, named by their
content, and what was made of a part of one, named by its origin.

Processes and runs share them. A copy that another process has removed, or that something has changed, is not there.
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
_SPARED = 0.9  # of the budget: what stays when it is exceeded, so that not every new copy removes an old one


class Copies:
    """Of one kind, up to `limit` bytes, those that were used last; 0 keeps none. Safe to use from several threads."""

    def __init__(self, kind: str, limit: int):
        self.kind, self.limit = kind, limit
        self._nbytes: int | None = None  # of the copies that are there, as far as this process knows
        self._counting = Lock()

    def read(self, digest: str) -> bytes | None:
        """The content of this sha256, if there is a copy."""
        data = self._read(digest)
        return data if data is not None and sha256(data).hexdigest() == digest else None

    def read_made(self, name: str) -> bytes | None:
        """What was kept under a name that is not its sha256, which then lies before it."""
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
        """A disk that is full is no reason to stop: then there is no copy."""
        if len(data) > self.limit:
            return
        path = cache_folder(self.kind) / name
        unfinished = temporary_beside(path)
        try:
            unfinished.write_bytes(data)
            os.replace(unfinished, path)
        except OSError as error:
            log.warning("no copy is kept at %s: %s", path, error.strerror or error)
            return
        finally:
            unfinished.unlink(missing_ok=True)
        with self._counting:
            self._nbytes = self._counted() if self._nbytes is None else self._nbytes + len(data)
            if self._nbytes > self.limit:
                self._nbytes = self._forget()

    def _counted(self) -> int:
        """Count the bytes of all copies, and remove the half-written ones that killed processes have left."""
        return sum(size for _, size, path in self._all() if not remove_left_behind(Path(path), A_DAY))

    def _forget(self) -> int:
        """Those that were used longest ago. How many bytes stay."""
        found = sorted(self._all())
        nbytes = sum(size for _, size, _ in found)
        for _, size, path in found:
            if nbytes <= _SPARED * self.limit:
                break
            with suppress(FileNotFoundError):  # another process has just removed it
                os.unlink(path)
            nbytes -= size
        return nbytes

    def _all(self) -> Iterator[tuple[float, int, str]]:
        """When each was used last, its size and where it lies; also what a process that was killed left unfinished."""
        with os.scandir(cache_folder(self.kind)) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    found = entry.stat()
                    yield found.st_mtime, found.st_size, entry.path
