"""How long a role that was asked to stop is waited for before it is made to.

A role says in its lease how many seconds it needs: the trainer what the steps until the next sync and what that stores
take (`seconds_to_stop`), any other role the longest time between two of its looks at what is wanted (`hears_every`).
Both are measured, so that a stop in order takes as long as the machine is slow.
"""

import time
from collections.abc import Mapping

from flows.alarms import how_far
from storage.leases import Lease, Seen
from tba.config import LimitsConfig

SAFETY = 2.0
"""Times what a role says it needs, after which it is made to stop unless it has got further meanwhile."""
MOST = 4.0
"""Times the longest such wait that a role which keeps getting further may take in all."""
HEARD = "stopping"  # how the status of a role begins that has heard that it is to stop and is on its way


def seconds_to_stop(lease: Lease) -> float:
    """Return how many seconds a role needs to stop, as it says itself; 0 where it has measured nothing."""
    return lease.progress.get("seconds_to_stop", lease.hears_every)


def slowest(seen: Mapping[str, Seen]) -> tuple[str, float]:
    """Return the role that needs longest to stop, and how many seconds; an empty name where nobody says anything."""
    needs = {name: seconds_to_stop(it.lease) for name, it in seen.items()}
    name = max(needs, key=lambda name: needs[name], default="")
    return (name, needs[name]) if name and needs[name] >= 1 else ("", 0.0)


def forecast(seen: Mapping[str, Seen]) -> str:
    """Say how long a stop may take, to be put after what is said of it; empty where nobody knows."""
    name, seconds = slowest(seen)
    return f"; {name} needs up to about {seconds:.0f} s" if name else ""


class Patience:
    """How long one role is waited for since it was asked to stop: `least` seconds, or SAFETY times what it says it
    needs; anew whenever it has got further, but MOST times that at most, and never beyond `limit` seconds."""

    def __init__(self, least: float, *, silent_after: float, limit: float | None = None):
        self.least, self.silent_after, self.limit = least, silent_after, limit
        self.began = self.moved = time.monotonic()
        self.allowed = self.longest = least  # seconds without getting further
        self.mark: tuple[float, str] | None = None

    def look(self, seen: Seen | None) -> None:
        """Take note of what the role says now. One that renews no lease gets on with nothing."""
        if seen is None or seen.silent_for > self.silent_after:
            self.allowed = self.least
            return
        lease = seen.lease
        self.allowed = max(self.least, SAFETY * seconds_to_stop(lease))
        self.longest = max(self.longest, self.allowed)
        mark = (how_far(lease), lease.status if lease.status.startswith(HEARD) else "")
        if self.mark not in (None, mark):
            self.moved = time.monotonic()
        self.mark = mark

    @property
    def seconds(self) -> float:
        """How many seconds the role has in all, as things stand."""
        most = min(self.moved - self.began + self.allowed, MOST * self.longest)
        return most if self.limit is None else min(most, self.limit)

    @property
    def is_over(self) -> bool:
        return time.monotonic() - self.began > self.seconds


class Stopping:
    """The patience with each role of a run that was asked to stop. `limit` is in seconds, where somebody else has set
    one: it counts whatever the roles say."""

    def __init__(self, limits: LimitsConfig, limit: float | None = None):
        self.limits, self.limit = limits, limit
        self.roles: dict[str, Patience] = {}

    def is_over(self, role: str, seen: Seen | None) -> bool:
        if role not in self.roles:
            self.roles[role] = patience(self.limits, self.limit)
        self.roles[role].look(seen)
        return self.roles[role].is_over

    def cut_short(self, seen: Mapping[str, Seen]) -> str:
        """Say which role needs longer than the limit; empty where none does."""
        name, seconds = slowest(seen)
        if self.limit is None or seconds <= self.limit:
            return ""
        return (
            f"{name} needs up to about {seconds:.0f} s to stop in order and is given {self.limit:.0f} s: what it has "
            "not stored by then is done again when the run goes on"
        )


def patience(limits: LimitsConfig, limit: float | None = None) -> Patience:
    """The patience with a role that is asked to stop at this moment."""
    least = limits.stop_grace if limit is None else min(limits.stop_grace, limit)
    return Patience(least, silent_after=limits.silent_after, limit=limit)
