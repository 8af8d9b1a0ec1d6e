"""Which GPUs a role takes: one lock file per device, held by the role itself for as long as it lives.

The lock is a `flock` on a descriptor the role inherits, so the kernel drops it with the role's last process whatever
becomes of the supervisor, and the kernel's list of locks says who is where. Roles of one run share devices when there
are fewer than roles need, the trainer's last: the lock file names the run that holds it, exclusively while taking it,
shared from then on. Without NVIDIA devices there is nothing to take.
"""

import fcntl
import os
import shutil
import socket
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from tba.config import Config
from tba.errors import ConfigError, RunFailed


class Taken(NamedTuple):
    """Devices taken for one role: start it with `variables` and `locks`, then `release` our copies."""

    uuids: tuple[str, ...]
    locks: tuple[int, ...]

    @property
    def variables(self) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.uuids)}

    def release(self) -> None:
        for lock in self.locks:
            os.close(lock)


class Devices:
    """The NVIDIA devices of this host, handed out to the roles of one run: `ranks` to its trainer, `per_engine` to each
    role that generates."""

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

    def take(self, kind: str) -> Taken | None:
        """All that a role of this kind needs, or None of it: free devices first, then the least used of those this run
        holds. Nobody else takes any meanwhile. A run that could not have an engine's devices takes none for its trainer
        either, so that two runs never hold what both of them wait for."""
        if not self.uuids:
            return None
        with self._alone():
            found = self._lock(needed := self.needed_by(kind))
            wanted = self.ranks if kind == "trainer" else self.per_engine
            kept = found[:wanted] if len(found) == needed else []
            for _, lock in found[len(kept) :]:
                os.close(lock)
            marks = [self._mark(uuid) for uuid, _ in kept] if kind == "trainer" else []
        return Taken(tuple(uuid for uuid, _ in kept), (*(lock for _, lock in kept), *marks)) if kept else None

    def needed_by(self, kind: str) -> int:
        """How many must be there for a role to take what it wants."""
        return max(self.ranks, self.per_engine) if kind == "trainer" else self.per_engine

    def _lock(self, count: int) -> list[tuple[str, int]]:
        """As many devices as can be had, up to so many."""
        found: list[tuple[str, int]] = []
        for wanted in (self._take_free, self._take_shared):
            for uuid in sorted(set(self.uuids) - {uuid for uuid, _ in found}, key=self._crowd):
                if len(found) < count and (lock := wanted(uuid)) is not None:
                    found.append((uuid, lock))
        return found

    @contextmanager
    def _alone(self) -> Iterator[None]:
        lock = _open(self.folder / "taking.lock")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _crowd(self, uuid: str) -> tuple[bool, int, int]:
        """Whether a device is the trainer's, how many roles hold it, and where it stands among all."""
        return holders(self._trainers(uuid)) > 0, holders(self._file(uuid)), self.uuids.index(uuid)

    def _mark(self, uuid: str) -> int:
        """Held by the trainer beside the lock."""
        mark = _open(self._trainers(uuid))
        fcntl.flock(mark, fcntl.LOCK_SH)
        return mark

    def _take_free(self, uuid: str) -> int | None:
        lock = _open(self._file(uuid))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(lock, 0)
            os.pwrite(lock, self.run.encode(), 0)
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        return self._if_ours(lock)

    def _take_shared(self, uuid: str) -> int | None:
        lock = _open(self._file(uuid))
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
    """The devices that roles with these settings may have on this host; ConfigError if they are too few for an engine
    or a trainer."""
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
    """While an engine starts no other does on its GPUs: vLLM takes whatever anybody allocates meanwhile for its own
    use, and has that much less left for keys and values. How many roles, this one with them, share the one of its GPUs
    that most share; 1 where no launcher gave it any."""
    folder, shown = lock_folder(), os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    with ExitStack() as held:
        for uuid in sorted(shown):  # in one order, so that nobody waits for whoever waits for them
            lock = _open(folder / f"gpu-{uuid}.engine.lock")
            held.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield max(1, *(holders(_lock_file(folder, uuid)) for uuid in shown))


def _lock_file(folder: Path, uuid: str) -> Path:
    return folder / f"gpu-{uuid}.lock"


def _open(path: Path) -> int:
    """Every user of the host locks here. No link that somebody has put there is followed: nothing of ours that lies
    elsewhere becomes everybody's."""
    with suppress(FileExistsError):
        path.parent.mkdir(parents=True)
    folder = path.parent.lstat()
    if stat.S_ISDIR(folder.st_mode) and folder.st_uid == os.geteuid():
        path.parent.chmod(0o1777)
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise RunFailed(f"GPUs are locked by {path}, which cannot be opened: {error.strerror}") from None
    with suppress(PermissionError):
        os.fchmod(lock, 0o666)
    return lock


def holders(path: Path) -> int:
    """How many hold the lock of a file, as the kernel lists them."""
    try:
        number = f":{path.stat().st_ino}"
        listed = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return 0
    return sum(any(field.endswith(number) for field in line.split()) for line in listed)


def lock_folder() -> Path:
    return Path(os.environ.get("TBA_LOCK_DIR") or Path(tempfile.gettempdir()) / "tba-locks")


def nvidia_devices() -> list[str]:
    """UUIDs of the devices this process may use; instances where a device is divided (MIG)."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed == "" or not any(Path("/dev").glob("nvidia[0-9]*")) or not shutil.which("nvidia-smi"):
        return []
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=True)
    except subprocess.SubprocessError as error:
        raise RunFailed(f"the GPUs of this machine cannot be listed: {error}; model.device=cpu does without") from None
    devices = parse_listing(listing.stdout)
    if allowed is None:
        return [uuid for parts in devices for uuid in parts]
    return [uuid for name in allowed.split(",") for uuid in _named(name.strip(), devices)]


def parse_listing(listing: str) -> list[list[str]]:
    """What `nvidia-smi -L` prints: per device its own UUID, or those of its instances where it has any."""
    devices: list[list[str]] = []
    whole: list[str] = []
    for line in listing.splitlines():
        if "UUID: " not in line:
            continue
        uuid = line.rsplit("UUID: ", 1)[1].rstrip(") \n")
        if line.startswith("GPU "):
            devices.append([])
            whole.append(uuid)
        elif devices:
            devices[-1].append(uuid)
    return [parts or [uuid] for parts, uuid in zip(devices, whole, strict=True)]


def _named(name: str, devices: list[list[str]]) -> list[str]:
    """What one entry of CUDA_VISIBLE_DEVICES stands for: a position, or a UUID or the beginning of one."""
    if name.isdigit():
        return devices[int(name)] if int(name) < len(devices) else []
    return [uuid for parts in devices for uuid in parts if uuid.startswith(name)]
