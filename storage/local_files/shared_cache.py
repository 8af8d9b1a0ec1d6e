"""A cache on this machine's disk: copies that can be had again, shared by processes and by runs.

Two locks keep the processes out of each other's way; the kernel gives back those of a process that dies. The *guard*
of a name is held, shared or alone, while a copy is looked at, made or removed. A copy that is *in use* is not removed:
each process uses those of each kind that it was given last.
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

_USED = 3  # of each kind: one that waits for its use, one that is being fetched meanwhile, and what that is made from

_in_use: dict[Path, dict[Path, int]] = {}  # by kind, the open files whose locks say so, the one given last at the end
_changing = threading.Lock()  # of what is in use


def cache_folder(kind: str) -> Path:
    """The folder for one kind of copy, under `$TBA_CACHE`, else `~/.cache/tba`. Made if it is not there."""
    folder = Path(os.environ.get("TBA_CACHE") or "~/.cache/tba").expanduser().absolute() / kind
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"the cache folder {folder} cannot be made (set TBA_CACHE): {error.strerror}") from error
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
    """A folder of the cache that is `whole`, by `make` if it is not there or not whole: of several processes that ask,
    one makes it. Nobody removes it before this process has been given three others of its kind, or ends. The cache
    keeps the `keep` of a kind that were asked for last, and what is in use. `prepare` comes before `make`, and may ask
    for another copy, as this process holds no guard then. `deadline` bounds the wait for another process."""
    copy = cache_folder(kind) / name
    try:
        with _guard(copy, fcntl.LOCK_SH, deadline):
            if there := whole(copy):
                _use(copy)
        if not there:
            prepare()
            with _guard(copy, fcntl.LOCK_EX, deadline):
                if not whole(copy):  # it may have been made while we waited
                    _make(copy, make)
                _use(copy)
        _forget_old(copy.parent, keep)
    except TBAError:
        raise
    except OSError as error:
        raise StorageError(f"the cache folder {copy}: {error.strerror or error}") from error
    return copy


def _make(copy: Path, make: Callable[[Path], object]) -> None:
    """Under its final name only when it is whole."""
    unfinished = _beside(copy, "part")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
        make(unfinished)
        shutil.rmtree(copy, ignore_errors=True)  # there, and not whole
        unfinished.rename(copy)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _beside(copy: Path, kind: str) -> Path:
    return copy.with_name(f".{copy.name}.{kind}")


def _use(copy: Path) -> None:
    """In place of what this process was given long ago. The caller has the guard."""
    os.utime(copy)
    descriptor = os.open(_beside(copy, "used"), os.O_RDWR | os.O_CREAT, 0o644)
    fcntl.flock(descriptor, fcntl.LOCK_SH)  # at once: who removes copies has a guard too
    with _changing:
        used = _in_use.setdefault(copy.parent, {})
        given_up = [used.pop(it) for it in list(used) if it == copy]
        used[copy] = descriptor
        given_up += [used.pop(it) for it in list(used)[:-_USED]]
    for it in given_up:
        os.close(it)


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
    except FileNotFoundError:  # another process has just removed it
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
    """A few names share a guard, so that there are never more than 256 of them."""
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
