"""Run a command, and measure the memory of all its processes."""

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

EVERY = 5.0
"""Seconds between two looks. Linux walks all pages of a process for this: with 10 GB, looking twice a second took a
quarter of a core."""


def measured(command: Sequence[str], environment: Mapping[str, str] | None = None) -> tuple[str, float]:
    """Run a command. Return its output, and the largest memory in GB that it and its descendants had together. Memory
    that processes share counts once."""
    peak = 0.0
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=environment)
        while process.poll() is None:
            peak = max(peak, sum(_memory(pid) for pid in _descendants(process.pid)))
            with suppress(subprocess.TimeoutExpired):
                process.wait(EVERY)
        out.seek(0)
        err.seek(0)
        if process.returncode:
            told = err.read()[-2000:]
            raise RuntimeError(f"{' '.join(command)} ended with exit code {process.returncode}:\n{told}")
        return out.read(), peak / 1e9


def _descendants(pid: int) -> list[int]:
    """Return the process and all its descendants that exist now."""
    found = [pid]
    for parent in found:  # grows while it is read
        with suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def _memory(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
