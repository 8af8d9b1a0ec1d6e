"""A machine that seems to have NVIDIA GPUs: a script in place of nvidia-smi, and a folder in place of /dev."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tba.runtime import nvidia

SCRIPT = """#!/bin/sh
case "$*" in
-L) cat <<'END'
{listing}
END
;;
*uuid,driver_version,memory.total,memory.free,name*) cat <<'END'
{table}
END
;;
*uuid,compute_cap*) cat <<'END'
{capabilities}
END
;;
*) exit 2 ;;
esac
"""


def set_machine(patch: pytest.MonkeyPatch, folder: Path, *, files: Sequence[str] = (), tools: str = "bin") -> Path:
    """Make a machine without GPUs, whose /dev has these files. Return the folder for its nvidia-smi: `bin` is on the
    PATH, and `wsl` is where WSL2 has it."""
    for part in ("bin", "wsl", "dev"):
        (folder / part).mkdir(exist_ok=True)
    for file in files:
        (folder / "dev" / file).touch()
    patch.setattr(nvidia, "DEVICE_FILES", folder / "dev")
    patch.setattr(nvidia, "WSL_TOOLS", str(folder / "wsl"))
    patch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return folder / tools


def set_gpus(
    patch: pytest.MonkeyPatch,
    folder: Path,
    count: int = 1,
    *,
    driver: str = "580.95.05",
    free: int = 81_000,
    instances: int = 0,
    files: Sequence[str] = ("nvidia0", "nvidiactl"),
    tools: str = "bin",
    capabilities: Sequence[str] = (),
) -> list[str]:
    """Make a machine with so many GPUs of 81,559 MiB. Their compute capability is 9.0 unless it is given. Each is
    divided into so many instances by MIG, unless `instances` is 0. Return the UUIDs that roles may use."""
    listing, table, usable = list[str](), list[str](), list[str]()
    for i in range(count):
        uuid, own = f"GPU-{i:04}", [f"MIG-{i:04}-{j}" for j in range(instances)]
        listing += [f"GPU {i}: NVIDIA H100 80GB HBM3 (UUID: {uuid})"]
        listing += [f"  MIG 1g.10gb     Device  {j}: (UUID: {it})" for j, it in enumerate(own)]
        table += [f"{uuid}, {driver}, 81559, {free}, NVIDIA H100 80GB HBM3"]
        usable += own or [uuid]
    place = set_machine(patch, folder, files=files, tools=tools)
    known = [f"GPU-{i:04}, {it}" for i, it in enumerate(capabilities or ["9.0"] * count)]
    text = {"listing": listing, "table": table, "capabilities": known}
    set_tool(place, SCRIPT.format(**{name: "\n".join(lines) for name, lines in text.items()}))
    return usable


def set_tool(folder: Path, script: str) -> None:
    """Put a script in place of nvidia-smi."""
    path = folder / "nvidia-smi"
    path.write_text(script)
    path.chmod(0o755)
