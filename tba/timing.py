"""Where the time goes: seconds added up by part."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    """Add the seconds spent inside the `with` block to `seconds[part]`."""
    began = time.monotonic()
    try:
        yield
    finally:
        seconds[part] = seconds.get(part, 0.0) + time.monotonic() - began
