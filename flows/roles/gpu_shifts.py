"""Let the roles of a run use their GPU one after the other (`model.gpu_shifts`).

Roles begin their shifts in the order in which they ask for them. A role that wants the GPU takes the last place of the
queue: a file with a number, which it locks. The role whose place has the lowest number begins once the lock of the GPU
is free, and leaves its place. The kernel releases all locks of a process that dies, and a place whose lock is free does
not count.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from glob import escape
from hashlib import sha256
from pathlib import Path

from flows.supervision.gpus import lock_folder, open_lock
from tba.runtime.shifts import Parks
from tba.runtime.waiting import looks

_LOOK_EVERY = 0.02  # seconds
_SILENT = 1.0  # seconds of waiting before the role reports it


class GpuShifts:
    """The shifts of one role; see `tba.runtime.shifts.Shift`.

    While the role waits, `check` is called, which may raise, and `tell` with the reason. A wait has no deadline: the
    supervisor ends a role that hangs in its shift. Without a GPU, the roles of the run `run` on this machine take
    shifts on its CPU.
    """

    is_shared = True

    def __init__(
        self,
        run: str,
        role: str,
        *,
        check: Callable[[], None],
        tell: Callable[[str], None],
        folder: Path | None = None,
    ):
        self.role, self.check, self.tell = role, check, tell
        self._held: list[Parks] = []
        self._parked: list[Parks] = []
        self._is_on = False
        device = os.environ.get("CUDA_VISIBLE_DEVICES") or sha256(run.encode()).hexdigest()[:16]
        folder = folder or lock_folder()
        self._queue = Queue(folder, f"gpu-{device}.place")
        self._gpu = open_lock(folder / f"gpu-{device}.shift.lock")

    def hold(self, *things: object) -> None:
        self._held += [thing for thing in things if isinstance(thing, Parks)]

    def begin(self) -> None:
        if self._is_on:
            return
        with self._queue.place() as is_first:
            self._take_gpu(is_first)
        self._is_on = True
        os.ftruncate(self._gpu, 0)
        os.pwrite(self._gpu, self.role.encode(), 0)
        while self._parked:
            self._parked.pop().unpark()

    def end(self) -> None:
        if not self._is_on:
            return
        from tba.runtime.parking import free_cache  # imports torch

        for thing in self._held:
            thing.park()
            self._parked.append(thing)
        free_cache()
        self._is_on = False
        fcntl.flock(self._gpu, fcntl.LOCK_UN)

    def _take_gpu(self, is_first: Callable[[], bool]) -> None:
        for waited in looks(float("inf"), every=_LOOK_EVERY):
            if is_first() and _lock(self._gpu):
                return
            self.check()
            if waited > _SILENT:
                self.tell(f"waiting {waited:.0f} s for the GPU, which {self._holder()} uses")

    def _holder(self) -> str:
        """Return the name of the role that took the GPU last."""
        return os.pread(self._gpu, 4096, 0).decode(errors="replace") or "another role"


class Queue:
    """A queue of processes, in a folder. Each place is a locked file, whose name is `name` and a number."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.name = folder, name
        self._changes = open_lock(folder / f"{name}s.lock")  # held while places are made, read or removed

    @contextmanager
    def place(self) -> Iterator[Callable[[], bool]]:
        """Take the last place for the `with` block. Yield a function that returns whether it has become the first."""
        with self._alone():
            number = max(self._numbers(), default=0) + 1
            lock = open_lock(self._file(number))
            _lock(lock)
        try:
            yield lambda: self._is_first(number)
        finally:
            with self._alone():
                self._file(number).unlink(missing_ok=True)
                os.close(lock)

    def _is_first(self, number: int) -> bool:
        with self._alone():
            return not any(self._is_taken(earlier) for earlier in self._numbers() if earlier < number)

    def _is_taken(self, number: int) -> bool:
        """True if the process in a place is alive. Remove the place of a dead process."""
        lock = open_lock(self._file(number))
        try:
            if not _lock(lock):
                return True
            with suppress(PermissionError):  # another user's
                self._file(number).unlink(missing_ok=True)
            return False
        finally:
            os.close(lock)

    def _numbers(self) -> list[int]:
        names = [it.name for it in self.folder.glob(f"{escape(self.name)}-*.lock")]
        return sorted(int(name.removeprefix(f"{self.name}-").removesuffix(".lock")) for name in names)

    def _file(self, number: int) -> Path:
        return self.folder / f"{self.name}-{number}.lock"

    @contextmanager
    def _alone(self) -> Iterator[None]:
        fcntl.flock(self._changes, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._changes, fcntl.LOCK_UN)


def _lock(file: int) -> bool:
    """Lock a file unless another process has locked it. Return whether it is locked now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
