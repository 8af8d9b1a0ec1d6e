"""Wait by looking again and again, and add up the seconds that the parts of a job take."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

_PAUSE = 0.005, 0.5  # seconds between two looks, at least and at most
_LATE = 0.05  # share of the time waited so far that the next pause may take


def looks(deadline: float, *, every: float | None = None) -> Iterator[float]:
    """Yield the seconds waited so far, once for each look at what somebody else does. The looks end with the first one
    after the deadline. `every` is the pause between two looks in seconds; by default the pauses grow with the wait."""
    began = time.monotonic()
    while True:
        yield (waited := time.monotonic() - began)
        if waited > deadline:
            return
        time.sleep(min(max(_LATE * waited, _PAUSE[0]), _PAUSE[1]) if every is None else every)


@contextmanager
def timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    """Add the seconds spent inside the `with` block to `seconds[part]`."""
    began = time.monotonic()
    try:
        yield
    finally:
        seconds[part] = seconds.get(part, 0.0) + time.monotonic() - began
