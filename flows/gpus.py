"""Which GPU a role takes: one lock file per device, held by the role itself for as long as it lives.

The lock is a `flock` on a descriptor the role inherits, so the kernel drops it with the role's last process whatever
becomes of the supervisor, and the kernel's list of locks says who is where. Roles of one run share devices when there
are fewer than roles, the trainer's last: the lock file names the run that holds it, exclusively while taking it,
shared from then on. Without NVIDIA devices there is nothing to take.
"""

import fcntl
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tba.errors import RunFailed


class Device(NamedTuple):
    """A device taken for one role: start it with `variables` and `locks`, then `release` our copies."""

    uuid: str
    locks: tuple[int, ...]

    @property
    def variables(self) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": self.uuid}

    def release(self) -> None:
        for lock in self.locks:
            os.close(lock)


class Devices:
    """The NVIDIA devices of this host, handed out to the roles of one run."""

    def __init__(self, run: str, *, folder: Path | None = None, uuids: list[str] | None = None):
        self.run = run
        self.folder = folder or lock_folder()
        self.uuids = nvidia_devices() if uuids is None else uuids

    def take(self, kind: str) -> Device | None:
        """A free device if there is one, else the least used of those this run holds, else None."""
        for wanted in (self._take_free, self._take_shared):
            for uuid in sorted(self.uuids, key=self._crowd):
                lock = wanted(uuid)
                if lock is not None:
                    return Device(uuid, (lock, self._mark(uuid)) if kind == "trainer" else (lock,))
        return None

    def _crowd(self, uuid: str) -> tuple[bool, int]:
        """Whether a device is the trainer's, and how many roles hold it."""
        return holders(self._trainers(uuid)) > 0, holders(self._file(uuid))

    def _mark(self, uuid: str) -> int:
        """Held by the trainer beside the lock."""
        mark = self._open(self._trainers(uuid))
        fcntl.flock(mark, fcntl.LOCK_SH)
        return mark

    def _take_free(self, uuid: str) -> int | None:
        lock = self._open(self._file(uuid))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(lock, 0)
            os.pwrite(lock, self.run.encode(), 0)
            # Not atomic: another run may slip in between, and then this fails and the device is not ours.
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        return self._if_ours(lock)

    def _take_shared(self, uuid: str) -> int | None:
        lock = self._open(self._file(uuid))
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
        return self.folder / f"gpu-{uuid}.lock"

    def _trainers(self, uuid: str) -> Path:
        return self.folder / f"gpu-{uuid}.trainer.lock"

    def _open(self, path: Path) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        with suppress(PermissionError):
            self.folder.chmod(0o1777)  # every user of the host locks here
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
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
