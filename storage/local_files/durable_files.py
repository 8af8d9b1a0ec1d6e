"""Writes files that appear complete and survive a loss of power, and locks folders."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from storage.local_files.temporary_files import mark_as_written, temporary_beside


@contextmanager
def written_beside(final: Path, content: bytes | Path) -> Iterator[Path]:
    """Write bytes, or the content of a file, durably to a hidden file in the folder of `final`. Yield the path of the
    hidden file, which is removed when the context ends."""
    temporary = temporary_beside(final)
    with _created(temporary) as file:
        mark_as_written(file)
        try:
            if isinstance(content, Path):
                with content.open("rb") as source:
                    shutil.copyfileobj(source, file, 1 << 20)
            else:
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def linked_beside(final: Path, source: Path) -> Iterator[Path]:
    """Like `written_beside`, for a file that never changes afterwards: if it is on the disk of `final`, the hidden file
    is a link to it, and no byte is copied."""
    temporary = temporary_beside(final)
    if not _link(source, temporary):
        with written_beside(final, source) as copied:
            yield copied
        return
    try:
        with temporary.open("rb") as file:
            mark_as_written(file)
            os.fsync(file.fileno())
            yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _link(source: Path, path: Path) -> bool:
    """Link a file, and make the folders of the link. Return False if that is not possible, as between two disks."""
    try:
        _make_folder(path.parent)
        os.link(source, path)
    except OSError:
        return False
    return True


def flush_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder. Only one process at a time can hold it; others wait."""
    with open(folder / ".lock", "ab", opener=_open_at_once) as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file closes, also if the process dies
        yield


def _created(path: Path) -> BinaryIO:
    """Create a file and its folders, and return the open file. If another process removes a folder in between, try
    again."""
    for _ in range(100):
        with contextlib.suppress(FileNotFoundError):
            _make_folder(path.parent)
            return path.open("xb")
    raise FileNotFoundError(path)


def _make_folder(folder: Path) -> None:
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
    flush_folder(folder.parent)


def _open_at_once(path: str, flags: int) -> int:
    """Open a file for writing. If a named pipe that nobody reads is in its place, fail instead of waiting for a
    reader."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)
