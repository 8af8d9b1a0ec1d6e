"""Watches the leases of a run, and measures on the watcher's own clock how long each lease has not changed."""

import time
from typing import NamedTuple

from storage.objects import records
from storage.runs import lives
from storage.runs.leases import Lease, read_roles
from storage.runs.run import Run


class Seen(NamedTuple):
    lease: Lease
    silent_for: float  # seconds since this watcher saw the lease change


class LeaseWatch:
    """Watches the leases of runs."""

    def __init__(self) -> None:
        self._changed: dict[tuple[str, str], tuple[tuple[int, int], float]] = {}
        self._last: dict[tuple[str, str], Lease] = {}
        self.damaged: dict[str, str] = {}  # why a role's lease cannot be read, as of the last look

    def observe(self, run: Run) -> dict[str, Seen]:
        """Return, for each role that ever held a lease, its lease and how long the lease has not changed. A lease that
        cannot be read is returned as it was read last and counts as unchanged: its holder would have written it
        again."""
        seen: dict[str, Seen] = {}
        found = read_roles(run)
        self.damaged = dict(found.damaged)
        for lease in [*found.leases, *(self._as_last_read(run, role) for role in found.damaged)]:
            who, beat, now = (run.url, lease.role), (lease.life, lease.counter), time.monotonic()
            self._last[who] = lease
            before = self._changed.get(who)
            if before is None or before[0] != beat:
                self._changed[who] = before = (beat, now)
            seen[lease.role] = Seen(lease, now - before[1])
        return seen

    def _as_last_read(self, run: Run, role: str) -> Lease:
        """Return the lease as this watcher read it last. If the watcher has never read it, return a lease with an
        unknown holder and the newest life that has written an event."""
        return self._last.get((run.url, role)) or Lease(
            role=role,
            life=lives.newest_with_events(run, role),
            host="an unknown machine",
            pid=0,
            counter=-1,
            status="its lease cannot be read",
            renewed_at=records.now(),
            supervised=False,
        )
