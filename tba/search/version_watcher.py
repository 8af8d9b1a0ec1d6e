"""New versions, looked for and fetched beside whoever is to take them."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tba.errors import Damaged
from tba.interfaces import VersionStore
from tba.runtime.background import Background
from tba.types import Version


class Found(NamedTuple):
    version: Version
    folder: Path | FileNotFoundError | Damaged  # with its verified files, or why there is none


class Lookout:
    """Makes one look at a time, in a thread of its own: for the newest version, which is fetched and verified where it
    is newer. `read_ahead` is given the folder then, in that thread too. However many versions were published since the
    look before, the newest alone is fetched.

    Belongs to the thread that made it. What goes wrong in a look, but for a version that is gone or damaged, is raised
    there at the next call.
    """

    def __init__(self, versions: VersionStore, read_ahead: Callable[[Path], object] | None = None):
        self.versions, self.read_ahead = versions, read_ahead
        self._line = Background("lookout")
        self._found: Found | None = None

    def look(self, *, after: Version | None, refused: Version | None = None) -> None:
        """Begin a look for a version newer than `after` and not `refused`, unless one is being made or has found what
        is not taken yet."""
        self._line.check()
        if self._line.idle() and self._found is None:
            self._line.submit(partial(self._look, after, refused))

    def take(self, *, wait: bool = False) -> Found | None:
        """What the last look has found, once; nothing while it is being made, unless that is waited for."""
        if wait:
            self._line.finish()
        self._line.check()
        if not self._line.idle():
            return None
        found, self._found = self._found, None
        return found

    def close(self) -> None:
        """Wait for the look that is being made; there may be others later."""
        self._line.close()
        self._line, self._found = Background("lookout"), None

    def _look(self, after: Version | None, refused: Version | None) -> None:
        newest = self.versions.newest()
        if newest is None or newest == refused or (after and newest.order <= after.order):
            return  # a listing that is behind may not even show the one in use
        try:
            folder = self.versions.load(newest)
        except (FileNotFoundError, Damaged) as fault:
            self._found = Found(newest, fault)
            return
        if self.read_ahead:
            self.read_ahead(folder)
        self._found = Found(newest, folder)
