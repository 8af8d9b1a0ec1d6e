"""Decide how long to wait for a role that was asked to stop, and when to send it which signal.

A role says in its lease how many seconds it needs to stop. For the trainer (`seconds_to_stop`) this is the time of the
steps until the next sync, if it takes any, plus the time to store that sync. For any other role (`hears_every`) it is
the longest recent time between two checks of the wanted state. Both are measured, so a slow machine gets more time for
a stop in order.
"""

import signal
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

from flows.supervision.alarms import how_far
from storage.runs.lease_watch import Seen
from storage.runs.leases import Lease
from tba.config import LimitsConfig

SAFETY = 2.0
"""A role may go without progress for this many times the seconds that it says it needs."""
MOST = 4.0
"""The whole wait for a role that keeps making progress is at most this many times the longest time that the role may
spend without progress."""
INSIST_EVERY = 5.0  # seconds between two kills of a life that hangs
HEARD = "stopping"  # the status of a role that knows that it is to stop begins with this word


def seconds_to_stop(lease: Lease) -> float:
    """Return how many seconds a role says that it needs to stop; 0 if it has not measured this yet."""
    return lease.progress.get("seconds_to_stop", lease.hears_every)


def slowest(seen: Mapping[str, Seen]) -> tuple[str, float]:
    """Return the role that needs longest to stop, and how many seconds. The name is empty if this is less than a
    second."""
    needs = {name: seconds_to_stop(role.lease) for name, role in seen.items()}
    name = max(needs, key=lambda name: needs[name], default="")
    return (name, needs[name]) if name and needs[name] >= 1 else ("", 0.0)


def forecast(seen: Mapping[str, Seen]) -> str:
    """Return how long a stop may take, as the end of a sentence. Empty if no role says that it needs time."""
    name, seconds = slowest(seen)
    return f"; {name} needs up to about {seconds:.0f} s" if name else ""


class Patience:
    """Decides how long to wait for one role to stop. The role may go without progress for SAFETY times the seconds that
    it says it needs, and at least for `least` seconds. Progress restarts this allowance. A role whose lease is silent
    for more than `silent_after` seconds is allowed only `least` seconds. The whole wait is at most MOST times the
    largest allowance, and at most `limit` seconds."""

    def __init__(self, least: float, *, silent_after: float, limit: float | None = None):
        self.least, self.silent_after, self.limit = least, silent_after, limit
        self.began = self.moved = time.monotonic()
        self.allowed = self.longest = least  # seconds without progress: now, and the most so far
        self.mark: tuple[float, str] | None = None

    def look(self, seen: Seen | None) -> None:
        """Note what the lease of the role says now. A role that does not renew its lease makes no progress."""
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
        """How many seconds the whole wait lasts if the role makes no more progress."""
        most = min(self.moved - self.began + self.allowed, MOST * self.longest)
        return most if self.limit is None else min(most, self.limit)

    @property
    def is_over(self) -> bool:
        return time.monotonic() - self.began > self.seconds


class Stopping:
    """How long to wait for each role of a run that was asked to stop. `limit` is the maximum in seconds, whatever the
    roles say; None means no maximum."""

    def __init__(self, limits: LimitsConfig, limit: float | None = None):
        self.limits, self.limit = limits, limit
        self.roles: dict[str, Patience] = {}

    def is_over(self, role: str, seen: Seen | None) -> bool:
        if role not in self.roles:
            self.roles[role] = patience(self.limits, self.limit)
        self.roles[role].look(seen)
        return self.roles[role].is_over

    def cut_short(self, seen: Mapping[str, Seen]) -> str:
        """Return a sentence about the role that needs longest if the limit is too short for it, else empty text."""
        name, seconds = slowest(seen)
        if self.limit is None or seconds <= self.limit:
            return ""
        return (
            f"{name} needs up to about {seconds:.0f} s to stop in order and is given {self.limit:.0f} s: work that it "
            "has not stored by then is repeated when the run is resumed"
        )


def patience(limits: LimitsConfig, limit: float | None = None) -> Patience:
    """Return a `Patience` for a role that is asked to stop now."""
    least = limits.stop_grace if limit is None else min(limits.stop_grace, limit)
    return Patience(least, silent_after=limits.silent_after, limit=limit)


class Draining:
    """Decides which signals to send to a searcher that is not wanted any more. The searcher reads in the wanted state
    that it is to stop. SIGTERM is due when its `Patience` is over, and SIGKILL `end_grace` seconds later."""

    def __init__(self, limits: LimitsConfig, end_grace: float):
        self.patience, self.end_grace = patience(limits), end_grace

    def due_signal(self, seen: Seen | None) -> signal.Signals | None:
        """Note what the lease of the role says, and return the signal to send now, or None."""
        self.patience.look(seen)
        if not self.patience.is_over:
            return None
        is_late = time.monotonic() - self.patience.began > self.patience.seconds + self.end_grace
        return signal.SIGKILL if is_late else signal.SIGTERM


class RepeatedKill:
    """Decides when to repeat the kill of a life that hangs. A kill can fail: the machine may be unreachable, or the
    process may wait for a disk. `end_grace` seconds after the first kill, the life counts as lost. If a lost life goes
    on later, it finds that another life holds its lease, and stops."""

    def __init__(self, now: float):
        self.began, self._next = now, now + INSIST_EVERY

    def is_lost(self, now: float, end_grace: float) -> bool:
        return now - self.began > end_grace

    def is_due(self, now: float) -> bool:
        """Return True if it is time for another kill. The caller then has to send it."""
        if now < self._next:
            return False
        self._next = now + INSIST_EVERY
        return True


class Wait(Protocol):
    """How long one rung of the stop ladder waits for each role."""

    def is_over(self, role: str, seen: Seen | None) -> bool: ...


class FixedWait:
    """A wait of the same number of seconds for every role. It begins when `is_over` is first called."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.ends: float | None = None

    def is_over(self, role: str, seen: Seen | None) -> bool:
        if self.ends is None:
            self.ends = time.monotonic() + self.seconds
        return time.monotonic() > self.ends


class Rung(NamedTuple):
    signal: signal.Signals | None  # sent to every living role; None: the roles read the wanted state
    wait: Wait


class StopLadder:
    """The rungs by which all roles of a run are stopped: the roles are asked to stop, then get SIGTERM, then SIGKILL. A
    rung ends when each role has ended or has used up the time of this rung. The first rung lasts as long as the roles
    say they need. `within` is the number of seconds until the supervisor itself is killed; the times are shortened to
    fit into it."""

    def __init__(self, limits: LimitsConfig, end_grace: float, within: float | None = None):
        self.patience = Stopping(limits, None if within is None else 0.7 * within)
        self.end_grace = end_grace if within is None else min(end_grace, 0.2 * within)

    def rungs(self, was_asked: bool) -> Iterator[Rung]:
        """Yield the rungs of the ladder: the request to stop with the roles' own time, then SIGTERM, then SIGKILL. If
        the request could not be stored (`was_asked` is False), begin with SIGTERM and give it the roles' own time."""
        if was_asked:
            yield Rung(None, self.patience)
        yield Rung(signal.SIGTERM, FixedWait(self.end_grace) if was_asked else self.patience)
        yield Rung(signal.SIGKILL, FixedWait(self.end_grace))
