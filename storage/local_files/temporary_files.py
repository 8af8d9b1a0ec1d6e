"""Temporary files beside the names that they are written for: `.NAME.` and twelve hexadecimal digits.

A writer holds a lock on its temporary file. The kernel gives the lock back when the process ends, so an old file that
nobody has locked was left behind by a process that was killed.
"""

import fcntl
import os
import re
import secrets
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

A_DAY = 24 * 3600.0
"""Seconds after which what a killed writer has left behind is removed."""

_NAME = re.compile(r"\.([A-Za-z0-9_][A-Za-z0-9_.=+@-]{0,240})\.[0-9a-f]{12}")


def temporary_beside(path: Path) -> Path:
    """Return a new name beside a path for writing what the path is to hold."""
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}")


def name_written(name: str) -> str | None:
    """Return the final name that a temporary file is written for; None if the name is not one of ours."""
    match = _NAME.fullmatch(name)
    return match[1] if match else None


def mark_as_written(file: BinaryIO) -> None:
    """Lock a temporary file for as long as it is open. Where locks are not known its age alone says that it is old."""
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def remove_left_behind(path: Path, seconds: float) -> bool:
    """Remove a temporary file that was written to last more than `seconds` ago and that no writer holds; True if it was
    removed. A file of any other name is never touched, nor is what cannot be looked at."""
    if name_written(path.name) is None:
        return False
    with suppress(OSError):
        if not stat.S_ISREG(path.lstat().st_mode):
            return False
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            if stat.S_ISREG(found.st_mode) and time.time() - found.st_mtime > seconds and not _is_held(descriptor):
                path.unlink()
                return True
        finally:
            os.close(descriptor)
    return False


def _is_held(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no locks on this file system
        return False
    return False
