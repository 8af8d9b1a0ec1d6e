"""Finds the reason why a role has to stop: its run was asked to stop, fewer searchers are wanted, or the role has no
supervisor."""

import time

from storage.runs import control
from storage.runs.leases import SUPERVISOR, readable_lease
from storage.runs.run import Run
from tba.errors import Damaged, Stopped, StorageError


class StopReasons:
    """Looks for a reason why a role has to stop, and keeps it as `reason`. `index` is the number of a searcher: a
    searcher has to stop if fewer searchers are wanted. With `orphan_after`, the role has to stop after so many seconds
    without a supervisor."""

    def __init__(self, run: Run, role: str, *, index: int | None = None, orphan_after: float | None = None):
        self.run, self.role = run, role
        self.reason: Stopped | None = None
        self._index = index
        self._silence = _Silence(run, orphan_after) if orphan_after else None
        self._state: control.State | None = None  # the wanted state as it was read last

    @property
    def supervised(self) -> bool:
        return self._silence is not None

    def ask(self, why: str) -> None:
        """Ask the role to stop, as if its run had been asked to stop. This method takes no lock, so a signal handler
        may call it."""
        self.reason = self.reason or Stopped(f"{self.role} was asked to stop: {why}")

    def look(self) -> None:
        """Look for a reason to stop: first in the wanted state of the run, then whether the role still has a
        supervisor. Raise Damaged if the wanted state cannot be read."""
        if self.reason:
            return
        damage: Damaged | None = None
        try:
            self._state = control.keep_state(self.run, self._state)
            self._compare(self._state or control.State())
        except Damaged as error:
            damage = error
        if self._silence and not self.reason:
            seconds = self._silence.measure()
            if seconds is not None:
                self.reason = Stopped(f"{self.role} has seen no supervisor for {seconds:.0f} s")
        if damage:
            raise damage

    def _compare(self, state: control.State) -> None:
        if state.desired == "stop":
            self.reason = Stopped(f"{self.run.name} was asked to stop{f': {state.why}' if state.why else ''}")
        elif self._index is not None and self._index >= state.searchers:
            self.reason = Stopped(f"{self.role} is not wanted any more: the run wants {state.searchers} searcher(s)")


class _Silence:
    """Measures for how long no supervisor has renewed its lease."""

    def __init__(self, run: Run, limit: float):
        self.run = run
        self.limit = limit
        self._seen: tuple[int, int] | None = None
        self._since = time.monotonic()

    def measure(self) -> float | None:
        """Return the seconds of silence if they exceed the limit, else None. If the store cannot be read, restart the
        time and raise the error, because this says nothing about the supervisor. A damaged lease counts as silence: a
        living supervisor would write it again."""
        try:
            lease = readable_lease(self.run, SUPERVISOR)
        except StorageError:
            self._since = time.monotonic()
            raise
        now = time.monotonic()
        seen = (lease.life, lease.counter) if lease else None
        if seen != self._seen:
            self._seen, self._since = seen, now
        return now - self._since if now - self._since > self.limit else None
