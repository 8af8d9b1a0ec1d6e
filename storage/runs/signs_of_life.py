"""Measures when a role last gave a sign of life, and how often it checks whether it has to stop."""

import threading
import time
from collections import deque

_LATELY = 600.0  # seconds for which the longest time between two looks at what is wanted counts


class SignsOfLife:
    """The signs of life of one role. Several threads may give signs at the same time."""

    def __init__(self) -> None:
        self._last_sign = time.monotonic()
        self._last_look: float | None = None  # none before the first look: to start takes longer than anything later
        self._gaps: deque[tuple[float, float]] = deque()  # when each ended, and its seconds; each longer than the next
        self._lock = threading.Lock()

    def give(self) -> None:
        """Note a sign of life: the role has just done some work."""
        self._last_sign = time.monotonic()

    def give_by_look(self) -> None:
        """Note that the role has just checked whether it has to stop. This is a sign of life too."""
        self._last_sign = now = time.monotonic()
        with self._lock:
            gap, self._last_look = now - (self._last_look or now), now
            while self._gaps and self._gaps[-1][1] <= gap:
                self._gaps.pop()
            self._gaps.append((now, gap))
            while self._gaps[0][0] < now - _LATELY:
                self._gaps.popleft()

    def quiet(self) -> float:
        """Return the seconds since the last sign."""
        return time.monotonic() - self._last_sign

    def longest_gap(self) -> float:
        """Return the longest time between two such checks, in seconds, within the last ten minutes."""
        with self._lock:
            return self._gaps[0][1] if self._gaps else 0.0
