"""Adopt the version that a searcher generates with: the newest version, or, with `sync.lag`, a version of a given
number."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tba.errors import Busy, Damaged, DeadlinePassed
from tba.interfaces import EventLog, Generator, ReadsAhead, VersionStore
from tba.runtime.shifts import Shift
from tba.runtime.waiting import looks
from tba.search.progress import Progress
from tba.search.version_watcher import VersionWatcher, numbered
from tba.types import Version

LOOK_EVERY = 1.0  # seconds between looks for a version while responses are in flight


class VersionAdoption:
    """Loads versions into a generator. A thread looks for versions and fetches them, so the searcher pauses only while
    its generator loads one. `deadline` is the longest wait for a version, in seconds.

    With `updates_in_flight`, a newer version is loaded while responses are in flight. Otherwise the version waits until
    these responses have finished.
    """

    def __init__(
        self,
        searcher: int,
        *,
        generator: Generator,
        versions: VersionStore,
        events: EventLog,
        progress: Progress,
        deadline: float,
        updates_in_flight: bool,
        shift: Shift,
    ):
        self.searcher, self.generator, self.versions, self.events = searcher, generator, versions, events
        self.progress, self.deadline, self.updates_in_flight = progress, deadline, updates_in_flight
        self.watcher = VersionWatcher(versions, generator.read_ahead if isinstance(generator, ReadsAhead) else None)
        self.shift = shift
        self.looked = 0.0  # time of the last look
        self.version: Version | None = None
        self.rounds_begun = 0  # number of rounds begun with this version
        self.fetched: tuple[Version, Path] | None = None  # to adopt once the responses in flight have finished
        self.refused: Version | None = None  # the newest damaged version, which is not fetched again

    def close(self) -> None:
        self.watcher.close()

    # --- waiting for a version ------------------------------------------------------------------------------------

    def await_first(self, poll: float = 1.0) -> None:
        """Wait until a version has been adopted. If the newest version is removed or damaged, wait for the next one
        that the trainer publishes."""
        for waited in looks(self.deadline, every=poll):
            self.progress.check()
            self.adopt_newest()
            if self.version:
                return
            self.shift.end()  # a version that cannot be loaded has begun it
            status = f"waiting {waited:.0f} s for a version to adopt{self._what_is_damaged}"
            self.progress.lease.tell(status, seconds_wait=waited)
        raise DeadlinePassed(
            f"no version could be adopted for {self.deadline:.0f} s (limits.data_deadline){self._what_is_damaged}"
        )

    def await_newer(self) -> None:
        """Wait until a version other than the one in use has been adopted."""
        with self.progress.timed("wait"):
            before = self.version
            for waited in looks(self.deadline):
                self.progress.check()
                self.adopt_newest()
                if self.version != before:
                    return
                self.shift.end()
                self.progress.tell(f"waiting {waited:.0f} s for a version after {before}")
            raise DeadlinePassed(
                f"no version after {before} for {self.deadline:g} s (limits.data_deadline){self._what_is_damaged}"
            )

    def await_number(self, number: int) -> None:
        """Wait until the version with this number has been adopted. If several attempts have published this number,
        adopt the version of the newest attempt. The deadline starts again whenever the trainer publishes any version,
        which shows that the trainer is alive."""
        with self.progress.timed("wait"):
            newest: Version | None = None
            while not self._has_adopted(number):
                self.shift.end()
                for waited in looks(self.deadline):
                    self.progress.check()
                    complete = self.versions.complete()
                    if complete and complete[-1] != newest:
                        newest = complete[-1]
                        break
                    self.progress.tell(f"waiting {waited:.0f} s for version {number}")
                else:
                    raise DeadlinePassed(
                        f"no version {number} could be adopted for {self.deadline:g} s (limits.data_deadline)"
                        f"{self._what_is_damaged}"
                    )

    def _has_adopted(self, number: int) -> bool:
        if version := numbered(self.versions, number):
            self.adopt(version)
        return self.is_in_use(number)

    def is_in_use(self, number: int) -> bool:
        return self.version is not None and self.version.number == number

    # --- looking for versions and adopting them -------------------------------------------------------------------

    def adopt(self, version: Version) -> None:
        """Adopt a version, unless it is in use or was refused as damaged. Fetch it first, unless `prefetch` has done
        so."""
        if version not in (self.version, self.refused):
            found = self.watcher.pop_found(wait=True)
            with self._reporting(version):
                if found and found.version == version and isinstance(found.folder, Path):
                    self._load(version, found.folder)
                else:
                    self._load(version, self.versions.load(version))

    def prefetch(self, number: int) -> None:
        """Fetch and verify the version with this number in the background, while responses are in flight, so that
        `await_number` need not. Look every second until it is published."""
        if not self.is_in_use(number) and time.monotonic() - self.looked >= LOOK_EVERY:
            self.watcher.begin_fetch(number, refused=self.refused)
            self.looked = time.monotonic()

    def adopt_newest(self) -> None:
        """Look for the newest version, and adopt it if it is newer. No response may be in flight."""
        self.begin_look()
        self.adopt_found(in_flight=False, wait=True)

    def begin_look(self) -> None:
        """Begin to look for the newest version and to fetch it, in a thread. `adopt_found` adopts it later."""
        with self.progress.timed("adopt"):
            self.watcher.begin_look(after=self.fetched[0] if self.fetched else self.version, refused=self.refused)
        self.looked = time.monotonic()

    def look_in_flight(self) -> None:
        """Look every second while responses are in flight, and adopt a newer version if `updates_in_flight` allows
        it."""
        if time.monotonic() - self.looked >= LOOK_EVERY:
            self.begin_look()
        self.adopt_found(in_flight=True)

    def adopt_found(self, *, in_flight: bool, wait: bool = False) -> None:
        """Adopt the version that the last look has found. If responses are in flight and `updates_in_flight` is false,
        keep the version until a later call without responses in flight. With `wait`, first wait for the look to end."""
        with self.progress.timed("adopt"):
            if found := self.watcher.pop_found(wait=wait):
                with self._reporting(found.version):
                    if isinstance(found.folder, Exception):
                        raise found.folder
                    self.fetched = found.version, found.folder
            if self.fetched and (not in_flight or (found and self.updates_in_flight)):
                self._load(*self.fetched)

    def _load(self, version: Version, folder: Path) -> None:
        """Load a version into the generator. If the generator is busy, the version stays fetched."""
        with self._reporting(version), suppress(Busy):
            self.shift.begin()
            self.generator.adopt(folder, version)
            self.version = self.progress.version = version
            self.rounds_begun, self.fetched = 0, None
            message = f"searcher {self.searcher} adopts {version}"
            self.events.write("version-adopted", message, version=str(version), folder=str(folder))

    @contextmanager
    def _reporting(self, version: Version) -> Iterator[None]:
        """If the version cannot be loaded in the `with` block, report that and continue without this version."""
        try:
            yield
            return
        except FileNotFoundError as error:  # pruned while it was read, so there is a newer version
            self.events.write("version-passed-over", str(error), severity="warning", version=str(version))
        except Damaged as error:
            self.refused = version
            self.events.write("version-refused", str(error), severity="error", version=str(version))
        if self.fetched and self.fetched[0] == version:
            self.fetched = None

    @property
    def _what_is_damaged(self) -> str:
        return f"; {self.refused} is damaged" if self.refused else ""
