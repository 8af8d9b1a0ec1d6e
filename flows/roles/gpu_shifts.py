"""Let the roles of a run use their GPU one after the other (`model.gpu_shifts`).

Two locks decide who is next. A role that wants the GPU first takes the lock of the waiting place, then waits for the
lock of the GPU, and then leaves the waiting place. So a role that has just ended its shift cannot begin another one
before the role in the waiting place. The kernel releases both locks when their holder dies.
"""

import fcntl
import os
from collections.abc import Callable
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
        self._waiting_place = open_lock(folder / f"gpu-{device}.next.lock")
        self._gpu = open_lock(folder / f"gpu-{device}.shift.lock")

    def hold(self, *things: object) -> None:
        self._held += [thing for thing in things if isinstance(thing, Parks)]

    def begin(self) -> None:
        if self._is_on:
            return
        self._take(self._waiting_place)
        try:
            self._take(self._gpu)
        finally:
            fcntl.flock(self._waiting_place, fcntl.LOCK_UN)
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

    def _take(self, lock: int) -> None:
        for waited in looks(float("inf"), every=_LOOK_EVERY):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                self.check()
            if waited > _SILENT:
                self.tell(f"waiting {waited:.0f} s for the GPU, which {self._holder()} uses")

    def _holder(self) -> str:
        """Return the name of the role that took the GPU last."""
        return os.pread(self._gpu, 4096, 0).decode(errors="replace") or "another role"
