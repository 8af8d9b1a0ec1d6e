"""Decides how long to wait for a role that was asked to stop, and when it is ended by force and by which signal.

A role says in its lease how many seconds it needs to stop. For the trainer that is the time of the steps until the next
sync and of storing that sync (`seconds_to_stop`); for any other role it is the longest time between two of its looks at
what is wanted (`hears_every`). Both are measured, so a slow machine gets more time for a stop in order.
"""

import signal
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

from flows.supervision.alarms import how_far
from storage.runs.leases import Lease, Seen
from tba.config import LimitsConfig

SAFETY = 2.0
"""A role that makes no progress is given this many times the seconds that it says it needs."""
MOST = 4.0
"""A role that keeps making progress is given this many times its longest such wait in all."""
INSIST_EVERY = 5.0  # seconds between two attempts at ending a life that hangs
HEARD = "stopping"  # the status of a role that has heard that it is to stop begins with this word


def seconds_to_stop(lease: Lease) -> float:
    """Return how many seconds a role needs to stop, as it says itself; 0 where it has measured nothing."""
    return lease.progress.get("seconds_to_stop", lease.hears_every)


def slowest(seen: Mapping[str, Seen]) -> tuple[str, float]:
    """Return the role that needs longest to stop, and how many seconds; an empty name where nobody says anything."""
    needs = {name: seconds_to_stop(role.lease) for name, role in seen.items()}
    name = max(needs, key=lambda name: needs[name], default="")
    return (name, needs[name]) if name and needs[name] >= 1 else ("", 0.0)


def forecast(seen: Mapping[str, Seen]) -> str:
    """Say how long a stop may take, to be put after what is said of it; empty where nobody knows."""
    name, seconds = slowest(seen)
    return f"; {name} needs up to about {seconds:.0f} s" if name else ""


class Patience:
    """The wait for one role that was asked to stop. It lasts `least` seconds, or SAFETY times what the role says it
    needs if that is longer. It begins again whenever the role makes progress, but ends after MOST times that in all,
    and after `limit` seconds in any case."""

    def __init__(self, least: float, *, silent_after: float, limit: float | None = None):
        self.least, self.silent_after, self.limit = least, silent_after, limit
        self.began = self.moved = time.monotonic()
        self.allowed = self.longest = least  # seconds without getting further
        self.mark: tuple[float, str] | None = None

    def look(self, seen: Seen | None) -> None:
        """Take note of what the role says now. A role that does not renew its lease makes no progress."""
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


class Draining:
    """The end of one searcher that is too many. The searcher hears by itself that it is to stop; SIGTERM is due once
    the patience with it is over, and SIGKILL `end_grace` seconds later."""

    def __init__(self, limits: LimitsConfig, end_grace: float):
        self.patience, self.end_grace = patience(limits), end_grace

    def due_signal(self, seen: Seen | None) -> signal.Signals | None:
        """Take note of what the role says, and return the signal to send at this moment, if any."""
        self.patience.look(seen)
        if not self.patience.is_over:
            return None
        is_late = time.monotonic() - self.patience.began > self.patience.seconds + self.end_grace
        return signal.SIGKILL if is_late else signal.SIGTERM


class RepeatedKill:
    """The end by force of a life that hangs. A kill can get lost, or not be heard: a machine is gone, a process waits
    for a disk. So the kill is repeated, until the life is given up for lost. The lease keeps a life that comes back
    from doing harm."""

    def __init__(self, now: float):
        self.began, self._next = now, now + INSIST_EVERY

    def is_lost(self, now: float, end_grace: float) -> bool:
        return now - self.began > end_grace

    def is_due(self, now: float) -> bool:
        """True if it is time for another kill, which then counts as sent."""
        if now < self._next:
            return False
        self._next = now + INSIST_EVERY
        return True


class Wait(Protocol):
    """How long a rung of the ladder waits for each role."""

    def is_over(self, role: str, seen: Seen | None) -> bool: ...


class FixedWait:
    """The same number of seconds for every role, whatever it says. They begin when they are first asked about."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.ends: float | None = None

    def is_over(self, role: str, seen: Seen | None) -> bool:
        if self.ends is None:
            self.ends = time.monotonic() + self.seconds
        return time.monotonic() > self.ends


class Rung(NamedTuple):
    signal: signal.Signals | None  # sent to every role that lives; None if the run's state asks them
    wait: Wait


class StopLadder:
    """How all roles of a run are stopped: they are asked, then sent SIGTERM, then SIGKILL. A rung ends as soon as
    nobody is left, the first one after as long as the roles say they need. `within` is how many seconds are left until
    somebody else ends the supervisor; the ladder is shortened to fit into them."""

    def __init__(self, limits: LimitsConfig, end_grace: float, within: float | None = None):
        self.patience = Stopping(limits, None if within is None else 0.7 * within)
        self.end_grace = end_grace if within is None else min(end_grace, 0.2 * within)

    def rungs(self, was_asked: bool) -> Iterator[Rung]:
        """Return the rungs. If the roles could not be asked (`was_asked` is False), SIGTERM is the first that they
        hear, and the patience with what they say follows it."""
        if was_asked:
            yield Rung(None, self.patience)
        yield Rung(signal.SIGTERM, FixedWait(self.end_grace) if was_asked else self.patience)
        yield Rung(signal.SIGKILL, FixedWait(self.end_grace))
