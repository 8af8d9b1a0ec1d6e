"""Where the time goes: seconds added up by part, and waiting in looks."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

_PAUSE = 0.005, 0.5  # seconds between two looks, at least and at most
_LATE = 0.05  # of what has been waited: so much longer it may take to see what is there


def looks(deadline: float) -> Iterator[float]:
    """Seconds that have been waited at each look for what somebody else does, less and less often; ends with the one
    after the deadline."""
    began = time.monotonic()
    while True:
        yield (waited := time.monotonic() - began)
        if waited > deadline:
            return
        time.sleep(min(max(_LATE * waited, _PAUSE[0]), _PAUSE[1]))


@contextmanager
def timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    """Add the seconds spent inside the `with` block to `seconds[part]`."""
    began = time.monotonic()
    try:
        yield
    finally:
        seconds[part] = seconds.get(part, 0.0) + time.monotonic() - began
