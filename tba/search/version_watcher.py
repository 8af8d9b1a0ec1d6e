"""Look for new versions and fetch them in a thread, while the searcher goes on."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tba.errors import Damaged
from tba.interfaces import VersionStore
from tba.runtime.background import Background
from tba.types import Version


class FetchedVersion(NamedTuple):
    version: Version
    folder: Path | FileNotFoundError | Damaged  # the folder of its verified files, or the error if there is none


class VersionWatcher:
    """Makes one look at a time, in its own thread. A look finds the newest version, and fetches and verifies it if it
    is newer than the version in use. Only the newest version is fetched, however many were published since the last
    look. With `sync.lag`, a look is for the version of a given number instead. After fetching, the look calls
    `read_ahead` with the version's folder.

    Only the thread that made a watcher may call its methods. An error of a look is raised at the next call. If the
    version that a look found is removed or damaged, the error is not raised but returned by `pop_found`.
    """

    def __init__(self, versions: VersionStore, read_ahead: Callable[[Path], object] | None = None):
        self.versions, self.read_ahead = versions, read_ahead
        self._line = Background("version-watcher")
        self._found: FetchedVersion | None = None

    def begin_look(self, *, after: Version | None, refused: Version | None = None) -> None:
        """Begin a look for a version that is newer than `after` and not `refused`. Do nothing if a look is under way,
        or if `pop_found` has not yet returned the version that the last look found."""
        self._begin(partial(self._look, after, refused))

    def begin_fetch(self, number: int, *, refused: Version | None = None) -> None:
        """Begin to fetch the version with this number, once it is published, unless it is `refused`. Do nothing if a
        look is under way, or if `pop_found` has not yet returned the version that the last look found."""
        self._begin(partial(self._look_for, number, refused))

    def _begin(self, look: Callable[[], None]) -> None:
        self._line.check()
        if self._line.idle() and self._found is None:
            self._line.submit(look)

    def wait(self) -> None:
        """Wait for the look that is under way. `pop_found` then returns the version that it found."""
        self._line.finish()

    def pop_found(self, *, wait: bool = False) -> FetchedVersion | None:
        """Return the version that the last look found, and forget it; None if it found no newer version. While a look
        is under way, return None, or, with `wait`, wait for the look to end."""
        if wait:
            self.wait()
        self._line.check()
        if not self._line.idle():
            return None
        found, self._found = self._found, None
        return found

    def close(self) -> None:
        """Wait for the look that is under way, and drop the version that it finds. The watcher can be used again."""
        self._line.close()
        self._line, self._found = Background("version-watcher"), None

    def _look(self, after: Version | None, refused: Version | None) -> None:
        newest = self.versions.newest()
        if newest is None or newest == refused or (after and newest.order <= after.order):
            return  # a stale listing may not even show the version in use
        self._fetch(newest)

    def _look_for(self, number: int, refused: Version | None) -> None:
        version = numbered(self.versions, number)
        if version is not None and version != refused:
            self._fetch(version)

    def _fetch(self, version: Version) -> None:
        try:
            folder = self.versions.load(version)
        except (FileNotFoundError, Damaged) as fault:
            self._found = FetchedVersion(version, fault)
            return
        if self.read_ahead:
            self.read_ahead(folder)
        self._found = FetchedVersion(version, folder)


def numbered(versions: VersionStore, number: int) -> Version | None:
    """Return the complete version with this number. If several attempts have published this number, return the version
    of the newest attempt; return None if none has."""
    candidates = [version for version in versions.complete() if version.number == number]
    return max(candidates, key=lambda version: version.order, default=None)
