"""The NVIDIA hardware of this machine: its GPUs, their memory, and why torch cannot use them.

This module needs only Python itself, so that a machine can be checked before anything is installed.
"""

import os
import shutil
import subprocess
import sys
from ast import literal_eval
from collections.abc import Callable, Collection
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from tba.errors import ConfigError, RunFailed

DEVICE_FILES = Path("/dev")
WSL_TOOLS = "/usr/lib/wsl/lib"
"""Folder of nvidia-smi in WSL2, which is not on the PATH of every process there."""
LEAST_DRIVERS = {13: 580, 12: 525, 11: 450}
"""Oldest driver on Linux for each major version of CUDA."""
LEAST_CAPABILITIES = {13: "7.5", 12: "5.0", 11: "3.5"}
"""Lowest compute capability of a GPU that each major version of CUDA compiles for."""
BFLOAT16 = "8.0"
"""Lowest compute capability of a GPU that multiplies bfloat16. vLLM refuses bfloat16 on others."""
HIDDEN = ("", "-1")
"""Values of CUDA_VISIBLE_DEVICES that hide all GPUs from a process."""


class Gpu(NamedTuple):
    """One GPU, as its driver describes it. Memory is in bytes."""

    uuid: str
    name: str
    driver: str
    total: int
    free: int

    @property
    def is_taken(self) -> bool:
        """True if some program uses the memory of this GPU. Drivers and screens take less than a tenth."""
        return self.free < 0.9 * self.total


def nvidia_devices() -> list[str]:
    """Return the UUIDs of the devices that this process may use. If a device is divided by MIG, return the UUIDs of its
    instances instead. Raise RunFailed if the machine has such devices, but its driver does not answer."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [] if allowed in HIDDEN else _list_devices()
    if allowed is None:
        return [uuid for parts in devices for uuid in parts]
    return [uuid for name in allowed.split(",") for uuid in _named(name.strip(), devices)]


def parse_listing(listing: str) -> list[list[str]]:
    """Parse the output of `nvidia-smi -L`. Return for each device its UUID, or the UUIDs of its MIG instances if it has
    any."""
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


def query_gpus() -> list[Gpu]:
    """Return the GPUs that the driver knows, whether this process may use them or not. Return an empty list if it does
    not answer."""
    found = list[Gpu]()
    with suppress(OSError, subprocess.SubprocessError):
        for line in _ask("--query-gpu=uuid,driver_version,memory.total,memory.free,name").splitlines():
            uuid, driver, total, free, name = (part.strip() for part in line.split(",", 4))
            found.append(Gpu(uuid, name, driver, _bytes(total), _bytes(free)))
    return found


def query_capabilities() -> dict[str, str]:
    """Return the compute capability of each GPU, such as 9.0, by UUID. Return an empty dict if the driver does not
    answer; those before version 510 do not know it."""
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        pairs = [line.split(",") for line in _ask("--query-gpu=uuid,compute_cap").splitlines()]
        return {uuid.strip(): capability.strip() for uuid, capability in pairs}
    return {}


def is_below(capability: str, least: str) -> bool:
    """Compare two compute capabilities. Return False if the first is unknown."""
    parts = [it.split(".") for it in (capability, least)]
    if not all(number.isdigit() for part in parts for number in part):
        return False
    return [int(it) for it in parts[0]] < [int(it) for it in parts[1]]


def memory_of(uuids: Collection[str]) -> list[int]:
    """Return the bytes of memory of each of these devices. Return an empty list if the driver does not know one of
    them, such as a MIG instance."""
    sizes = {gpu.uuid: gpu.total for gpu in query_gpus() if gpu.total}
    return [sizes[uuid] for uuid in uuids] if set(uuids) <= set(sizes) else []


def refuse_cpu(
    setting: str, cuda: str | None, found: str = "", *, torch_works: Callable[[], bool] = lambda: False
) -> None:
    """Raise ConfigError if this process may use NVIDIA GPUs, but torch would compute on the CPU. The setting has the
    value `auto`. `cuda` is the version of CUDA that torch is built for, or None. `found` is the error of torch, if it
    is known; without it, only faults count that are known without torch, and only if `torch_works` returns False: a
    packaged driver, for example, can make a torch work that is too new for the installed one."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in HIDDEN:
        return
    listed = bool(_list_devices())
    if not listed and not any(DEVICE_FILES.glob("nvidia[0-9]*")):
        return
    why = fault(cuda)
    if not why and listed and not nvidia_devices():
        why = f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')} names none of them"
    if found or (why and not torch_works()):
        raise ConfigError(
            f"{setting}: this machine has NVIDIA GPUs, but {why or found}; {setting}=cpu, or CUDA_VISIBLE_DEVICES= "
            "before a command, computes on the CPU all the same, got 'auto'"
        )


def fault(cuda: str | None) -> str:
    """Return why a torch that is built for this version of CUDA cannot use the GPUs of this machine, and what to do.
    Return an empty text if no reason is known."""
    if cuda is None:
        return "torch is built without CUDA: `make install-gpu` installs a build with CUDA, if pip takes it from PyPI"
    least = LEAST_DRIVERS.get(int(cuda.partition(".")[0]), 0)
    for gpu in query_gpus():
        major = gpu.driver.partition(".")[0]
        if major.isdigit() and int(major) < least:
            return (
                f"torch is built for CUDA {cuda}, which needs a driver of version {least} or newer, and the driver is "
                f"{gpu.driver}: update the driver of NVIDIA"
            )
    return ""


def cuda_of_torch() -> str | None:
    """Return the version of CUDA that the installed torch is built for, without importing torch. Return None if torch
    is built without CUDA, or is not installed."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    for line in Path(spec.origin).with_name("version.py").read_text().splitlines():
        name, is_assigned, value = line.partition("=")
        if is_assigned and name.partition(":")[0].strip() == "cuda":
            return literal_eval(value.strip())
    return None


def torch_finds_gpus() -> bool:
    """Ask torch, in a process of its own, because it takes seconds to import."""
    command = [sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]
    try:
        return subprocess.run(command, capture_output=True, timeout=120).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _ask(query: str) -> str:
    tool = _tool()
    if tool is None:
        raise FileNotFoundError("nvidia-smi")
    command = [tool, query, *(["--format=csv,noheader,nounits"] if query != "-L" else [])]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def _tool() -> str | None:
    return shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path=WSL_TOOLS)


def _list_devices() -> list[list[str]]:
    """Return the UUIDs of all devices, as `parse_listing` does."""
    if _tool() is None:
        return []
    try:
        return parse_listing(_ask("-L"))
    except (OSError, subprocess.SubprocessError) as error:
        # A machine without a GPU may have the tools of the driver. WSL2 has only the file dxg, for all its GPUs.
        if not any(DEVICE_FILES.glob("nvidia[0-9]*")) and not (DEVICE_FILES / "dxg").exists():
            return []
        raise RunFailed(f"nvidia-smi cannot list the GPUs: {error}; model.device=cpu trains without GPUs") from None


def _named(name: str, devices: list[list[str]]) -> list[str]:
    """Return the UUIDs that one entry of CUDA_VISIBLE_DEVICES stands for. The entry is the index of a device, a UUID,
    or the beginning of a UUID."""
    if name.isdigit():
        return devices[int(name)] if int(name) < len(devices) else []
    return [uuid for parts in devices for uuid in parts if name and uuid.startswith(name)]


def _bytes(mebibytes: str) -> int:
    """Return a number of bytes, or 0 if the driver tells none."""
    return int(mebibytes) * 2**20 if mebibytes.isdigit() else 0
