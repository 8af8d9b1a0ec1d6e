"""Verifies files by their sha256, once on each machine: processes trust a verification that another process of this
machine has done.

A verification is a small file in the cache folder, a *mark*. Its name is made from the identity of the verified file
(device, inode, size and time of its last change), its sha256, and the start of this machine. So a mark says nothing
about a file that has changed since, nor about a copy of the file, nor anything after a restart. A process that verifies
a file holds the lock of its mark, so that other processes wait for the result instead of reading the file too.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from storage.local_files.regular_files import open_regular, sha256_of_file
from storage.local_files.remembered_reads import SETTLED_SECONDS
from storage.local_files.shared_cache import cache_folder
from storage.local_files.temporary_files import A_DAY
from tba.errors import StorageError

KIND = "verified-files"
"""Name of the folder of marks in the cache."""

_PATIENCE = 120.0  # seconds to wait for another process that verifies the file; then this process verifies it too


def has_sha256(path: Path, digest: str, *, trusts_marks: bool) -> bool:
    """Return whether a file has this sha256. With `trusts_marks`, the file is not read if it has a mark, and gets one
    if it has this sha256. A file that changed in the last seconds gets no mark, because one more change could leave its
    identity as it is. Raise FileNotFoundError if there is no regular file at the path."""
    if not trusts_marks or (mark := _mark_of(path, digest)) is None:
        return sha256_of_file(path) == digest
    if _is_set(mark):
        return True
    with _locked(mark) as file:
        if file is not None and _is_set(mark):
            return True  # another process has verified the file meanwhile
        if sha256_of_file(path) != digest:
            return False
        if file is not None and _mark_of(path, digest) == mark:  # the file did not change while it was read
            with suppress(OSError):  # without a mark, the next process verifies the file again
                file.write(b"1")
    return True


def vouch(path: Path, digest: str) -> None:
    """Give a mark to a file whose sha256 this process has computed while it wrote the file, and which no other process
    knows yet."""
    settle(path)
    if mark := _mark_of(path, digest):
        with _locked(mark) as file:
            if file is not None:
                with suppress(OSError):  # without a mark, the next process verifies the file
                    file.write(b"1")


def settle(path: Path) -> None:
    """Set the time of the last change of a file that no other process knows yet to a moment ago. The file can then get
    a mark at once, since any later change gives it another time."""
    earlier = time.time_ns() - int(2 * SETTLED_SECONDS * 1e9)
    os.utime(path, ns=(earlier, earlier))


def _mark_of(path: Path, digest: str) -> Path | None:
    """Return the path of a file's mark; None if the file may not have a mark, or if no marks can be kept."""
    with open_regular(path) as file:
        about = os.fstat(file.fileno())
    if time.time() - about.st_mtime < SETTLED_SECONDS or not (start := _start_of_machine()):
        return None
    identity = f"{start} {about.st_dev} {about.st_ino} {about.st_size} {about.st_mtime_ns} {digest}"
    try:
        return cache_folder(KIND) / sha256(identity.encode()).hexdigest()
    except StorageError:
        return None


def _is_set(mark: Path) -> bool:
    with suppress(OSError):
        about = mark.stat()
        return about.st_size > 0 and time.time() - about.st_mtime < A_DAY
    return False


@contextmanager
def _locked(mark: Path) -> Iterator[BinaryIO | None]:
    """Hold the lock of a mark, and yield the open mark. Yield None if the mark cannot be written, or if another process
    holds the lock for too long."""
    try:
        file = mark.open("a+b", buffering=0)
    except OSError:
        yield None
        return
    with file:
        _remove_old(mark.parent)
        yield file if _lock(file) else None


def _lock(file: BinaryIO) -> bool:
    began = time.monotonic()
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() - began >= _PATIENCE:
                return False
            time.sleep(0.02)
        except OSError:  # no locks on this file system
            return False
        else:
            file.seek(0)
            return True


def _remove_old(folder: Path) -> None:
    """Remove marks that are older than a day. Their files are verified again when they are needed."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if time.time() - entry.stat().st_mtime > A_DAY:
                os.unlink(entry.path)


@cache
def _start_of_machine() -> str:
    """Return a name that the kernel gives to each start of the machine; empty if it gives none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
