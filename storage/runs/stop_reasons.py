"""Why a role has to stop: its run was asked to, it is one searcher too many, or nobody supervises it."""

import time

from storage.runs import control
from storage.runs.leases import SUPERVISOR, readable_lease
from storage.runs.run import Run
from tba.errors import Damaged, Stopped, StorageError


class StopReasons:
    """The reason why a role has to stop, once there is one. A searcher says by `index` which one it is. With
    `orphan_after`, a role has to stop after so many seconds without a supervisor."""

    def __init__(self, run: Run, role: str, *, index: int | None = None, orphan_after: float | None = None):
        self.run, self.role = run, role
        self.reason: Stopped | None = None
        self._index = index
        self._silence = _Silence(run, orphan_after) if orphan_after else None
        self._state: control.State | None = None  # as it was read last

    @property
    def supervised(self) -> bool:
        return self._silence is not None

    def ask(self, why: str) -> None:
        """Ask the role to stop, as if its run had been. Takes no lock: it may be called by a signal handler."""
        self.reason = self.reason or Stopped(f"{self.role} was asked to stop: {why}")

    def look(self) -> None:
        """Look for a reason: in the run's state, then at whether anybody still supervises. Damaged if the state cannot
        be read."""
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
            self.reason = Stopped(f"{self.role} is one too many of {state.searchers}")


class _Silence:
    """How long no supervisor has been seen."""

    def __init__(self, run: Run, limit: float):
        self.run = run
        self.limit = limit
        self._seen: tuple[int, int] | None = None
        self._since = time.monotonic()

    def measure(self) -> float | None:
        """Seconds of silence, if they are too many. A store that cannot be read says nothing about supervisors, so
        the time starts anew. A damaged lease is silence: a supervisor that lives would write it again."""
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
