"""Finds out from stored events and logs which lives of a role existed, for a role whose lease cannot be read.

Two lives must never have the same number. Otherwise their events and logs would mix, and a life that was thought dead
would take the lease of the next life for its own.
"""

import re

from storage import layout
from storage.runs.run import Run

MOST_LIVES = 10**8
"""A lease with this life number or a higher one is damaged: the names of events and logs have no room for such
numbers."""

_SAID = re.compile(rb'"life"\s*:\s*([0-9]{1,9})(?![0-9.eE])')


def newest_with_events(run: Run, role: str) -> int:
    """Return the number of the newest life of a role that has written an event; 0 if there is none. Each life writes an
    event once it holds the lease."""
    return _newest(run, role, f"{layout.EVENTS}{role}/")


def next_after_damage(run: Run, role: str, damaged: bytes) -> int:
    """Return a number for the next life of a role whose lease is damaged. It is higher than every number of a life in
    the role's events, in the names of its logs, and in `damaged`, the bytes of the lease."""
    said = (int(match[1]) for match in _SAID.finditer(damaged))
    known = max((life for life in said if life < MOST_LIVES), default=0)
    return 1 + max(known, newest_with_events(run, role), _newest(run, role, f"{layout.LOGS}{role}-"))


def _newest(run: Run, role: str, prefix: str) -> int:
    names = (layout.parse_life(entry.key) for entry in run.store.list(prefix))
    return max((name[1] for name in names if name and name[0] == role), default=0)
