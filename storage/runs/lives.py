"""Finds the lives of a role by the events and logs that they stored, for when the role's lease cannot be read.

A life must never have the number of another: its events and its log would mix with theirs, and a life that was thought
dead would take the lease of the next for its own.
"""

import re

from storage import layout
from storage.runs.run import Run

MOST_LIVES = 10**8
"""A lease that claims a higher number is damaged: names of events and logs have no room for it."""

_SAID = re.compile(rb'"life"\s*:\s*([0-9]{1,9})(?![0-9.eE])')


def newest_with_events(run: Run, role: str) -> int:
    """Return the newest life of a role that has written an event, which it does once it holds the lease; 0 if there is
    none."""
    return _newest(run, role, f"{layout.EVENTS}{role}/")


def next_after_damage(run: Run, role: str, damaged: bytes) -> int:
    """Return a number beyond every life of a role that its events, its logs or the remains of its lease speak of."""
    said = (int(match[1]) for match in _SAID.finditer(damaged))
    known = max((life for life in said if life < MOST_LIVES), default=0)
    return 1 + max(known, newest_with_events(run, role), _newest(run, role, f"{layout.LOGS}{role}-"))


def _newest(run: Run, role: str, prefix: str) -> int:
    names = (layout.parse_life(entry.key) for entry in run.store.list(prefix))
    return max((name[1] for name in names if name and name[0] == role), default=0)
