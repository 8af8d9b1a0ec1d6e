"""Poll until something happens, and measure how long the parts of a job take."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

_PAUSE = 0.005, 0.5  # shortest and longest pause between two looks, in seconds
_LATE = 0.05  # length of the next pause, as a share of the time waited so far


def looks(deadline: float, *, every: float | None = None) -> Iterator[float]:
    """Yield the seconds waited so far, each time that the caller should look again. The first look after the deadline
    is the last. `every` is the pause between two looks in seconds; by default the pauses grow with the wait."""
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
