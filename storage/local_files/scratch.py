"""Scratch folders among the system's temporary files: each goes with its use, or else when the next one is made.

Who uses one holds a lock on it, which the kernel gives back when the process dies. So whoever gets the lock of another
knows that nobody will come back for it.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "tba-scratch-"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder of one's own; what killed processes have left behind is removed first."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it is in use, another user's, or has just been removed
            _remove(left, _lock(left, fcntl.LOCK_EX | fcntl.LOCK_NB))
    folder, lock = _make()
    try:
        yield folder
    finally:
        _remove(folder, lock)


def _make() -> tuple[Path, int]:
    """And its lock; before that is taken, another process may find the folder and remove it."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        with suppress(FileNotFoundError):
            lock = _lock(folder, fcntl.LOCK_SH)
            if folder.exists():
                return folder, lock
            os.close(lock)


def _lock(folder: Path, kind: int) -> int:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, kind)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
