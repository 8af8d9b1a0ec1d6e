"""Assign GPUs to roles. Each device has a lock file, and a role holds the lock of its devices as long as it lives.

The lock is a `flock` on a file descriptor that the role inherits. The kernel therefore releases the lock when the
role's last process ends, even if the supervisor has died before, and the kernel's list of locks shows how many roles
use a device. The lock file contains the URL of the run that holds the device. Taking a free device locks the file
exclusively, writes the URL, and keeps a shared lock, so that other roles of the same run can share the device. Roles
share devices if too few are free, and share the trainer's devices last. On a host without NVIDIA devices, roles start
without any device or lock.
"""

import fcntl
import os
import socket
import stat
import tempfile
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from tba.config import Config
from tba.errors import ConfigError, RunFailed
from tba.runtime.nvidia import cuda_of_torch, nvidia_devices, query_gpus, refuse_cpu, torch_finds_gpus

TRAINERS = ("trainer", "trainer-node")
"""The kinds of roles that hold the devices of a trainer."""


class HeldDevices(NamedTuple):
    """Devices that are locked for one role. Start the role with the environment `variables` and the file descriptors
    `locks`, then `release` this process's copies of the locks."""

    uuids: tuple[str, ...]
    locks: tuple[int, ...]

    @property
    def variables(self) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.uuids)}

    def release(self) -> None:
        for lock in self.locks:
            os.close(lock)


class Devices:
    """Hands out the NVIDIA devices of this host to the roles of one run: `ranks` devices to its trainer, `per_engine`
    devices to each role that generates."""

    def __init__(
        self,
        run: str,
        *,
        folder: Path | None = None,
        uuids: list[str] | None = None,
        ranks: int = 1,
        per_engine: int = 1,
    ):
        self.run, self.ranks, self.per_engine = run, ranks, per_engine
        self.folder = folder or lock_folder()
        self.uuids = nvidia_devices() if uuids is None else uuids

    def acquire(self, kind: str) -> HeldDevices | None:
        """Lock as many devices as a role of this kind needs. Return None, and lock none, if this host has no devices or
        too few are available. Free devices come first, then those devices of this run that the fewest roles use. A lock
        keeps other processes from taking devices during this call. The trainer takes devices only if there are enough
        for an engine too. Otherwise two runs could each hold a part of the devices that both need, and wait for each
        other for ever."""
        if not self.uuids:
            return None
        with self._alone():
            locked = self._lock(needed := self.needed_by(kind))
            wanted = self.ranks if kind in TRAINERS else self.per_engine
            kept = locked[:wanted] if len(locked) == needed else []
            for _, lock in locked[len(kept) :]:
                os.close(lock)
            marks = [self._mark(uuid) for uuid, _ in kept] if kind in TRAINERS else []
        return HeldDevices(tuple(uuid for uuid, _ in kept), (*(lock for _, lock in kept), *marks)) if kept else None

    def needed_by(self, kind: str) -> int:
        """Return how many devices `acquire` must lock at once before it gives any to a role of this kind. The trainer
        needs enough for an engine too, although it keeps only `ranks` of them."""
        return max(self.ranks, self.per_engine) if kind in TRAINERS else self.per_engine

    def _lock(self, count: int) -> list[tuple[str, int]]:
        """Lock up to `count` devices. Return their UUIDs and locks."""
        locked: list[tuple[str, int]] = []
        for lock_device in (self._lock_free, self._lock_shared):
            for uuid in sorted(set(self.uuids) - {uuid for uuid, _ in locked}, key=self._crowd):
                if len(locked) < count and (lock := lock_device(uuid)) is not None:
                    locked.append((uuid, lock))
        return locked

    @contextmanager
    def _alone(self) -> Iterator[None]:
        lock = open_lock(self.folder / "taking.lock")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _crowd(self, uuid: str) -> tuple[bool, int, int]:
        """Return the sort key of a device: whether a trainer holds it, how many roles hold it, and its position."""
        return holders(self._trainers(uuid)) > 0, holders(self._file(uuid)), self.uuids.index(uuid)

    def _mark(self, uuid: str) -> int:
        """Return a lock on the file that marks a device as a trainer's. The trainer also locks the device itself."""
        mark = open_lock(self._trainers(uuid))
        fcntl.flock(mark, fcntl.LOCK_SH)
        return mark

    def _lock_free(self, uuid: str) -> int | None:
        lock = open_lock(self._file(uuid))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(lock, 0)
            os.pwrite(lock, self.run.encode(), 0)
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        return self._if_ours(lock)

    def _lock_shared(self, uuid: str) -> int | None:
        lock = open_lock(self._file(uuid))
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        return self._if_ours(lock)

    def _if_ours(self, lock: int) -> int | None:
        if os.pread(lock, 4096, 0).decode(errors="replace") == self.run:
            return lock
        os.close(lock)
        return None

    def _file(self, uuid: str) -> Path:
        return _lock_file(self.folder, uuid)

    def _trainers(self, uuid: str) -> Path:
        return self.folder / f"gpu-{uuid}.trainer.lock"


def usable(config: Config, per_engine: int = 1, ranks: int = 1) -> list[str]:
    """Return the devices of this host that roles with these settings may use. Raise ConfigError if they are too few for
    an engine or for the trainer, or if torch cannot use them and roles would compute on the CPU without a word."""
    if config.model.device == "auto":
        refuse_cpu("model.device", cuda_of_torch(), torch_works=torch_finds_gpus)
    devices = [] if config.model.device == "cpu" else nvidia_devices()
    if devices and ranks > len(devices):
        raise ConfigError(f"training.ranks: roles may use {len(devices)} GPUs of {socket.gethostname()}, got {ranks}")
    if per_engine > max(1, len(devices)):
        raise ConfigError(
            f"engine.tensor_parallel: roles may use {len(devices)} GPUs of {socket.gethostname()}, got {per_engine}"
        )
    return devices


@contextmanager
def engine_start() -> Iterator[int]:
    """Keep other engines from starting on the GPUs of this role during the `with` block, in which its own engine
    starts. vLLM counts all GPU memory that is allocated during its start as its own, and would leave that much less for
    keys and values. Yield how many roles, including this one, share the most crowded of these GPUs. Yield 1 if no
    launcher has assigned GPUs to this role."""
    folder, shown = lock_folder(), held_devices() or [""]  # without a launcher, all engines of the host share one lock
    with ExitStack() as held:
        for uuid in sorted(shown):  # always in the same order, against deadlocks
            lock = open_lock(folder / f"gpu-{uuid}.engine.lock")
            held.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield max(1, *(holders(_lock_file(folder, uuid)) for uuid in shown))


def held_devices() -> list[str]:
    """Return the UUIDs of the devices that a launcher has assigned to this role."""
    return list(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))


def _lock_file(folder: Path, uuid: str) -> Path:
    return folder / f"gpu-{uuid}.lock"


def open_lock(path: Path) -> int:
    """Open a lock file that every user of the host may lock. Symbolic links are not followed: otherwise another user
    could place a link and have one of our own files made writable for everybody."""
    with suppress(FileExistsError):
        path.parent.mkdir(parents=True)
    folder = path.parent.lstat()
    if stat.S_ISDIR(folder.st_mode) and folder.st_uid == os.geteuid():
        path.parent.chmod(0o1777)
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise RunFailed(f"the lock file {path} of a GPU cannot be opened: {error.strerror}") from None
    with suppress(PermissionError):
        os.fchmod(lock, 0o666)
    return lock


def holders(path: Path) -> int:
    """Return how many locks the kernel lists for a file."""
    try:
        number = f":{path.stat().st_ino}"
        listed = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return 0
    return sum(any(field.endswith(number) for field in line.split()) for line in listed)


def lock_folder() -> Path:
    return Path(os.environ.get("TBA_LOCK_DIR") or Path(tempfile.gettempdir()) / "tba-locks")


def memory_warnings(uuids: Collection[str], *, own: int = 0) -> list[str]:
    """Return a warning for each device whose memory is taken although no role holds the device, or only `own` roles
    do."""
    folder, warnings = lock_folder(), list[str]()
    for gpu in query_gpus() if uuids else ():
        if gpu.uuid in uuids and gpu.is_taken and holders(_lock_file(folder, gpu.uuid)) <= own:
            warnings.append(
                f"only {gpu.free / 2**30:.1f} of the {gpu.total / 2**30:.1f} GiB of {gpu.name} ({gpu.uuid}) are free, "
                "although no role of a run uses it: `nvidia-smi` shows which program does; end that program, or choose "
                "other GPUs with CUDA_VISIBLE_DEVICES"
            )
    return warnings
