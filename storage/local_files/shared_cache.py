"""A cache on this machine's disk, shared by processes and runs. Its copies can be made again at any time.

Two locks coordinate the processes; the kernel releases the locks of a process that dies. The *guard* of a name is held,
shared or exclusive, while a copy is checked, made or removed. A second lock marks a copy as *in use*, so that it is not
removed: each process uses the last few copies of each kind that it has asked for.
"""

import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tba.errors import DeadlinePassed, StorageError, TBAError

_USED = 3  # copies of each kind: one that is ready, one that is being fetched, and the base that it is made from

_in_use: dict[Path, dict[Path, int]] = {}  # by kind: the copies in use, the latest last, and the open file of each lock
_changing = threading.Lock()  # protects _in_use


def cache_folder(kind: str) -> Path:
    """Return the folder for one kind of copy, under `$TBA_CACHE` or else `~/.cache/tba`. Make it if necessary."""
    folder = Path(os.environ.get("TBA_CACHE") or "~/.cache/tba").expanduser().absolute() / kind
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"the cache folder {folder} cannot be made: {error.strerror}; set TBA_CACHE to another folder"
        ) from error
    return folder


def shared_copy(
    kind: str,
    name: str,
    *,
    whole: Callable[[Path], bool],
    make: Callable[[Path], object],
    keep: int,
    prepare: Callable[[], object] = lambda: None,
    deadline: float = 600.0,
) -> Path:
    """Return the folder `name` of a kind in the cache, after `whole` has accepted it. If it does not exist or is not
    whole, `make` makes it. If several processes ask at the same time, one makes it and the others wait, at most
    `deadline` seconds.

    The folder stays until this process ends or has asked for three others of its kind. The cache keeps the `keep` most
    recently used copies of a kind, and those in use. `prepare` is called before `make`. It may ask for another copy,
    because this process then holds no guard."""
    copy = cache_folder(kind) / name
    try:
        with _guard(copy, fcntl.LOCK_SH, deadline):
            if there := whole(copy):
                _use(copy)
        if not there:
            prepare()
            with _guard(copy, fcntl.LOCK_EX, deadline):
                if not whole(copy):  # another process may have made the copy during the wait
                    _make(copy, make)
                _use(copy)
        _forget_old(copy.parent, keep)
    except TBAError:
        raise
    except OSError as error:
        raise StorageError(f"the cache folder {copy} cannot be used: {error.strerror or error}") from error
    return copy


def _make(copy: Path, make: Callable[[Path], object]) -> None:
    """Make a copy. It gets its final name only when it is whole."""
    unfinished = _beside(copy, "part")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)  # left by a process that was killed
        make(unfinished)
        shutil.rmtree(copy, ignore_errors=True)  # a copy that exists but is not whole
        unfinished.rename(copy)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _beside(copy: Path, kind: str) -> Path:
    return copy.with_name(f".{copy.name}.{kind}")


def _use(copy: Path) -> None:
    """Mark a copy as in use by this process. Only the `_USED` copies of a kind that were marked last stay marked. The
    caller holds the guard of the copy."""
    os.utime(copy)
    descriptor = os.open(_beside(copy, "used"), os.O_RDWR | os.O_CREAT, 0o644)
    fcntl.flock(descriptor, fcntl.LOCK_SH)  # does not wait: a process that removes copies needs the guard
    with _changing:
        used = _in_use.setdefault(copy.parent, {})
        released = [used.pop(copy)] if copy in used else []
        used[copy] = descriptor
        released += [used.pop(oldest) for oldest in list(used)[:-_USED]]
    for old_descriptor in released:
        os.close(old_descriptor)


def _forget_old(folder: Path, keep: int) -> None:
    by_use = sorted(folder.glob("[!.]*"), key=_last_use, reverse=True)
    begun = {folder / path.name[1:].removesuffix(".part") for path in folder.glob(".*.part")}
    for copy in begun.union(by_use[keep:]):
        with suppress(DeadlinePassed), _guard(copy, fcntl.LOCK_EX, 0.0):
            shutil.rmtree(_beside(copy, "part"), ignore_errors=True)
            if copy not in by_use[:keep] and not _is_used(copy):
                shutil.rmtree(copy, ignore_errors=True)
                _beside(copy, "used").unlink(missing_ok=True)


def _last_use(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another process has just removed the copy
        return 0.0


def _is_used(copy: Path) -> bool:
    with suppress(FileNotFoundError), _beside(copy, "used").open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextmanager
def _guard(copy: Path, kind: int, wait: float) -> Iterator[None]:
    """Hold the guard of a copy. Copies whose names begin with the same two characters share a guard, so there are at
    most 256 guards."""
    path, began = copy.with_name(f".{copy.name[:2]}.lock"), time.monotonic()
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() - began >= wait:
                    raise DeadlinePassed(
                        f"waited {wait:g} s for another process to make or remove {copy}: its lock is {path}"
                    ) from None
                time.sleep(0.05)
        yield
