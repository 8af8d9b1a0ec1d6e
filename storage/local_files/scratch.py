"""Makes scratch folders, among the system's temporary files or inside a folder that is given. A scratch folder is
removed after use. If its process was killed, it is removed when the next scratch folder is made in the same place, or
by `remove_left`.

The process that uses a folder holds a lock on it, which the kernel releases when the process dies. So a folder whose
lock is free is no longer needed.
"""

import fcntl
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "tba-scratch-"
_HIDDEN = f".{_PREFIX}"  # a store takes no hidden file for an object
_HOST = re.sub(r"[^\w.]+", "-", socket.gethostname()) + "@"  # no name of another host can begin with this


@contextmanager
def scratch_folder(inside: Path | None = None) -> Iterator[Path]:
    """Yield a new folder for this process alone: among the system's temporary files, or a hidden folder inside another
    folder, whose disk must have locks. Folders that killed processes have left there are removed first."""
    parent, prefix = (inside, _HIDDEN) if inside else (Path(tempfile.gettempdir()), _PREFIX)
    _clean(parent, prefix)
    folder, lock = _make(parent, f"{prefix}{_HOST}")
    try:
        yield folder
    finally:
        _remove(folder, lock)


def remove_left(inside: Path) -> None:
    """Remove the hidden folders that killed processes of this machine have left in a folder. Those of other machines
    stay: their disk may be shared without locks."""
    _clean(inside, f"{_HIDDEN}{_HOST}")


def _clean(parent: Path, prefix: str) -> None:
    for left in parent.glob(f"{prefix}*"):
        with suppress(OSError):  # the folder is in use, belongs to another user, or has just been removed
            _remove(left, _lock(left, fcntl.LOCK_EX | fcntl.LOCK_NB))


def _make(parent: Path, prefix: str) -> tuple[Path, int]:
    """Make a folder and lock it. Try again if another process removes the folder before it is locked."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
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
