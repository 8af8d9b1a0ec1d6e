"""Decides when a role that has ended may be started again, and when it has ended so often that the run is given up."""

from collections import deque

from tba.config import LimitsConfig
from tba.errors import RunFailed

LONGEST_DELAY = 60.0  # seconds between two restarts of a role


class RestartBudget:
    """The restarts that one role has left.

    A role may end `limits.max_restarts` times within `limits.restart_window` seconds, and as many times in a row
    without making progress. Only one life in a row may fail to take the role's lease. One end more raises RunFailed.
    Every moment is a number of seconds on one clock that never goes back, such as `time.monotonic`.
    """

    def __init__(self, limits: LimitsConfig, first_delay: float):
        self.limits, self.first_delay = limits, first_delay
        self.not_before = 0.0  # the moment from which on the role may be started
        self._ends: deque[float] = deque()  # the moments of the ends that the window still covers
        self._furthest = 0.0
        self._ends_without_progress = 0
        self._lives_without_lease = 0

    def note_progress(self, how_far: float) -> None:
        """Take note of how far the role has got. Getting further than ever forgives the ends without progress."""
        if how_far > self._furthest:
            self._furthest, self._ends_without_progress = how_far, 0

    def note_lease(self) -> None:
        """Take note that a life of the role has taken its lease."""
        self._lives_without_lease = 0

    def spend(self, role: str, how: str, now: float, *, seconds_without_lease: float | None = None) -> float:
        """Count one end of the role, and return how many seconds it has to wait for its next start. RunFailed, saying
        `how` the role has ended, if it has ended too often. A life that was killed because it took no lease says by
        `seconds_without_lease` how long it had been waited for."""
        window, allowed = self.limits.restart_window, self.limits.max_restarts
        self._ends.append(now)
        while now - self._ends[0] > window:
            self._ends.popleft()
        self._ends_without_progress += 1
        if len(self._ends) > allowed:
            raise RunFailed(f"{role} ended {len(self._ends)} times within {window:.0f} s, the last time {how}")
        if self._ends_without_progress > allowed:
            times = f"{self._ends_without_progress} times without getting any further"
            raise RunFailed(f"{role} ended {times}, the last time {how}")
        if seconds_without_lease is not None:
            self._lives_without_lease += 1
            if self._lives_without_lease > 1:
                raise RunFailed(f"{role} took no lease in {seconds_without_lease:.0f} s, twice; {how}")
        delay = min(self.first_delay * 2 ** (len(self._ends) - 1), LONGEST_DELAY)
        self.not_before = now + delay
        return delay
