"""Leases as a supervisor has seen them, by a clock that a test sets."""

import pytest

from storage.objects.records import now
from storage.runs.lease_watch import Seen
from storage.runs.leases import Lease


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 1000.0
        monkeypatch.setattr("flows.supervision.stopping.time.monotonic", lambda: self.now)


def seen(status: str = "step 3 of 9", *, silent_for: float = 0.0, hears_every: float = 0.0, **progress: float) -> Seen:
    return Seen(
        Lease(
            role="trainer",
            life=1,
            host="here",
            pid=1,
            counter=1,
            status=status,
            progress=progress,
            renewed_at=now(),
            supervised=True,
            hears_every=hears_every,
        ),
        silent_for,
    )
