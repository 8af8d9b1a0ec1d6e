"""A disk that is nearly full."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

PAGE = 4096


class Disk:
    """A small disk. It is full when it has no room for another byte, or for another name of a file."""

    def __init__(self, folder: Path, lacks: str):
        self.folder, self.lacks = folder, lacks
        self.ballast, self.names = folder / "ballast", list[str]()

    def fill(self, room: int = 0) -> None:
        """Fill the disk, except for `room` pages or names."""
        self.ballast.mkdir(exist_ok=True)
        with suppress(OSError):
            while True:
                with (self.ballast / str(len(self.names))).open("wb", buffering=0) as file:
                    if self.lacks == "bytes":
                        file.write(bytes(PAGE))
                self.names.append(file.name)
        for _ in range(room):
            os.unlink(self.names.pop())

    def free(self) -> None:
        for path in self.ballast.iterdir():
            path.unlink()
        self.names.clear()

    def files(self) -> dict[str, bytes]:
        """Return all files, hidden ones too."""
        return {
            path.relative_to(self.folder).as_posix(): path.read_bytes()
            for path in self.folder.rglob("*")
            if path.is_file() and path.parent != self.ballast and path.name != ".lock"
        }


@contextmanager
def small_disk(folder: Path, room: str, lacks: str = "bytes") -> Iterator[Disk]:
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", room, "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small disk can only be mounted by root (or under `unshare -rm`): {mounted.stderr.strip()}")
    try:
        yield Disk(folder, lacks)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
