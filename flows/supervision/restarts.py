"""Decides when a role that has ended may be started again, and when it has ended so often that the run fails."""

from collections import deque

from tba.config import LimitsConfig
from tba.errors import RunFailed

LONGEST_DELAY = 60.0  # seconds between two restarts of a role


class RestartBudget:
    """Counts the ends of one role.

    A role may end `limits.max_restarts` times within `limits.restart_window` seconds, and as many times in a row
    without making progress. Two lives in a row may not both fail to take the role's lease. An end beyond these limits
    raises RunFailed. All moments are seconds of the same monotonic clock, such as `time.monotonic`.
    """

    def __init__(self, limits: LimitsConfig, first_delay: float):
        self.limits, self.first_delay = limits, first_delay
        self.not_before = 0.0  # the earliest moment of the next start
        self._ends: deque[float] = deque()  # the moments of the ends within the window
        self._furthest = 0.0
        self._ends_without_progress = 0
        self._lives_without_lease = 0

    def note_progress(self, how_far: float) -> None:
        """Note how far the role has got. If that is further than ever before, reset the count of ends without
        progress."""
        if how_far > self._furthest:
            self._furthest, self._ends_without_progress = how_far, 0

    def note_lease(self) -> None:
        """Note that a life of the role has taken its lease."""
        self._lives_without_lease = 0

    def spend(self, role: str, how: str, now: float, *, seconds_without_lease: float | None = None) -> float:
        """Count one end of the role, and return after how many seconds the role may be started again. Raise RunFailed,
        which says `how` the role ended last, if it has ended too often. If its life was killed because it took no
        lease, `seconds_without_lease` is how long it took none; otherwise None."""
        window, allowed = self.limits.restart_window, self.limits.max_restarts
        self._ends.append(now)
        while now - self._ends[0] > window:
            self._ends.popleft()
        self._ends_without_progress += 1
        if len(self._ends) > allowed:
            raise RunFailed(f"{role} ended {len(self._ends)} times within {window:.0f} s, the last time {how}")
        if self._ends_without_progress > allowed:
            times = f"{self._ends_without_progress} times without making progress"
            raise RunFailed(f"{role} ended {times}, the last time {how}")
        if seconds_without_lease is not None:
            self._lives_without_lease += 1
            if self._lives_without_lease > 1:
                raise RunFailed(f"{role} took no lease in {seconds_without_lease:.0f} s, twice; {how}")
        delay = min(self.first_delay * 2 ** (len(self._ends) - 1), LONGEST_DELAY)
        self.not_before = now + delay
        return delay
