"""Waits for what processes and threads do."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T | None], what: str = "", within: float = 60.0, *, log: Path | None = None) -> T:
    """Wait until a condition holds, and return its value. After `within` seconds, fail, and show the end of the log."""
    deadline = time.monotonic() + within
    while not (value := condition()):
        assert time.monotonic() < deadline, (
            f"not within {within:g} s: {what or condition}\n{log.read_text()[-3000:] if log else ''}"
        )
        time.sleep(0.05)
    return value
