"""Temporary files: a file is written under a temporary name in its final folder, and then renamed. A temporary name is
`.NAME.` and twelve hexadecimal digits, where NAME is the final name.

A writer holds a lock on its temporary file. The kernel releases the lock when the process ends, so an old file without
a lock was left by a process that was killed.
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
"""Seconds after which files that killed writers have left are removed."""

_NAME = re.compile(r"\.([A-Za-z0-9_][A-Za-z0-9_.=+@-]{0,240})\.[0-9a-f]{12}")


def temporary_beside(path: Path) -> Path:
    """Return a new temporary path in the folder of `path`: write the file there, then rename it to `path`."""
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}")


def name_written(name: str) -> str | None:
    """Return the final name that a temporary name stands for; None if `name` is not a temporary name."""
    match = _NAME.fullmatch(name)
    return match[1] if match else None


def mark_as_written(file: BinaryIO) -> None:
    """Lock a temporary file for as long as it is open. On a file system without locks, only the age of a file shows
    that it was left behind."""
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def remove_left_behind(path: Path, seconds: float) -> bool:
    """Remove a temporary file if it was last written more than `seconds` ago and no writer has locked it. Return True
    if it was removed. A file that does not have a temporary name, or that cannot be read, is never removed."""
    if name_written(path.name) is None:
        return False
    with suppress(OSError):
        if not stat.S_ISREG(path.lstat().st_mode):
            return False
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode) and time.time() - status.st_mtime > seconds and not _is_held(descriptor):
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
