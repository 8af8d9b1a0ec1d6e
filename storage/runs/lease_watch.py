"""Watches the leases of a run, and measures on the local clock for how long each of them has not changed."""

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
    def __init__(self) -> None:
        self._changed: dict[tuple[str, str], tuple[tuple[int, int], float]] = {}
        self._last: dict[tuple[str, str], Lease] = {}
        self.damaged: dict[str, str] = {}  # by role, why its lease could not be read at the last look

    def observe(self, run: Run) -> dict[str, Seen]:
        """Return, for each role that ever held a lease, the lease and how long it has been silent. A lease that cannot
        be read counts as unchanged, because a living holder would write it again; the lease that was read last is
        returned for it."""
        seen: dict[str, Seen] = {}
        roles = read_roles(run)
        self.damaged = dict(roles.damaged)
        for lease in [*roles.leases, *(self._as_last_read(run, role) for role in roles.damaged)]:
            who, beat, now = (run.url, lease.role), (lease.life, lease.counter), time.monotonic()
            self._last[who] = lease
            before = self._changed.get(who)
            if before is None or before[0] != beat:
                self._changed[who] = before = (beat, now)
            seen[lease.role] = Seen(lease, now - before[1])
        return seen

    def _as_last_read(self, run: Run, role: str) -> Lease:
        """Return the lease as this watcher read it last. If it was never read, return the lease of an unknown holder,
        with the newest life that events mention."""
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
