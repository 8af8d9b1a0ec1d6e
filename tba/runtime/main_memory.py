"""The main memory that processes of this machine may use: that of the machine, or the limit of a container."""

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
"""Folder in which the files of the kernel are looked for."""
_VERSIONS = {"": ("", "memory.max"), "memory": ("memory", "memory.limit_in_bytes")}
"""For the controller that a line of /proc/self/cgroup names: the folder below /sys/fs/cgroup and the file of the limit.
Version 2 of control groups names none."""


def main_memory() -> int:
    """Return the bytes of main memory that this process and those that it starts may use at most."""
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_limits()])


def _limits() -> Iterator[int]:
    """Yield the limits of the control groups that this process belongs to. Each group limits the groups inside it."""
    try:
        lines = (ROOT / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not on Linux
        return
    for line in lines:
        _, controllers, place = line.split(":", 2)
        for controller in controllers.split(","):
            if controller not in _VERSIONS:
                continue
            folder, name = _VERSIONS[controller]
            top = ROOT / "sys/fs/cgroup" / folder
            inside = top / place.lstrip("/")
            # A container may show its own group at the top, although the line names the place outside of it.
            for group in (inside, *inside.parents):
                if group == top or top in group.parents:
                    yield from _limit(group / name)


def _limit(file: Path) -> Iterator[int]:
    try:
        text = file.read_text().strip()
    except OSError:
        return
    if text.isdecimal():  # not `max`, which means no limit
        yield int(text)
