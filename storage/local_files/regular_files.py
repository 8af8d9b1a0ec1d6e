"""Reads regular files only, because opening a named pipe, a device or a socket may wait for ever.

A link counts as the file that it leads to. Anything that is not a regular file counts as missing.
"""

import errno
import os
import stat
from hashlib import file_digest
from io import BufferedReader
from pathlib import Path

_KINDS = (
    (stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISDIR, "a folder"),
    (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"),
)  # fmt: skip
_NOWHERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading, and never wait for a writer. Raise FileNotFoundError if there is nothing at the
    path, or something that is not a regular file, such as a folder or a named pipe."""
    if not path.is_file():
        raise _missing(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # something else has just replaced the file
        os.close(descriptor)
        raise _missing(path)
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read()


def sha256_of_file(path: Path) -> str:
    with open_regular(path) as file:
        return file_digest(file, "sha256").hexdigest()


def irregular_kind(path: Path) -> str:
    """Return what lies at a path if that is not a regular file, in words such as `a named pipe`. Return an empty string
    if it is a regular file or if nothing is there."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return "a link that leads nowhere" if error.errno in _NOWHERE and path.is_symlink() else ""
    return next((kind for is_kind, kind in _KINDS if is_kind(mode)), "")


def about(entry: os.DirEntry[str]) -> os.stat_result | None:
    """Return the status of an entry of a folder; None if the entry is a link that leads nowhere, or was removed after
    the folder was listed."""
    try:
        return entry.stat()
    except OSError as error:
        if error.errno in _NOWHERE:
            return None
        raise


def _missing(path: Path) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
