"""Measures when a role last gave a sign of life, and how often the role checks whether it has to stop."""

import threading
import time
from collections import deque

_LATELY = 600.0  # seconds for which a gap between two checks counts


class SignsOfLife:
    """The signs of life of one role. Several threads may give signs at the same time."""

    def __init__(self) -> None:
        self._last_sign = time.monotonic()
        self._last_look: float | None = None  # None before the first check, so that the slow start is no gap
        self._gaps: deque[tuple[float, float]] = deque()  # (end, seconds) of gaps, each longer than the next
        self._lock = threading.Lock()

    def give(self) -> None:
        """Record a sign of life: the role has just done some work."""
        self._last_sign = time.monotonic()

    def give_by_look(self) -> None:
        """Record that the role has just checked whether it has to stop. This is a sign of life too."""
        self._last_sign = now = time.monotonic()
        with self._lock:
            gap, self._last_look = now - (self._last_look or now), now
            while self._gaps and self._gaps[-1][1] <= gap:
                self._gaps.pop()
            self._gaps.append((now, gap))
            while self._gaps[0][0] < now - _LATELY:
                self._gaps.popleft()

    def quiet(self) -> float:
        """Return the seconds since the last sign of life."""
        return time.monotonic() - self._last_sign

    def longest_gap(self) -> float:
        """Return the longest time between two calls of `give_by_look`, in seconds, within the last ten minutes."""
        with self._lock:
            return self._gaps[0][1] if self._gaps else 0.0
