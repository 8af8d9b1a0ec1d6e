"""The main memory that processes may use, from the files of the kernel."""

import os
from pathlib import Path

import pytest

from tba.runtime import main_memory
from tba.runtime.main_memory import main_memory as found

ALL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(main_memory, "ROOT", tmp_path)
    return tmp_path


def put(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_without_control_groups_the_whole_machine_counts():
    assert found() == ALL


@pytest.mark.parametrize(
    ("line", "files", "most"),
    [
        ("0::/a/b", {"a/b/memory.max": "max\n", "a/memory.max": "4096\n"}, 4096),
        ("0::/a/b", {"a/b/memory.max": "2048\n", "a/memory.max": "4096\n"}, 2048),
        ("0::/outside", {"memory.max": "8192\n"}, 8192),  # a container that sees its own group at the top
        ("4:memory:/a", {"memory/a/memory.limit_in_bytes": "4096\n"}, 4096),
        ("4:cpu,memory:/a", {"memory/memory.limit_in_bytes": "1024\n"}, 1024),
        ("4:cpu:/a", {"memory/a/memory.limit_in_bytes": "4096\n"}, ALL),
        ("0::/", {"memory.max": "max\n"}, ALL),
        ("0::/", {"memory.max": f"{2**80}\n"}, ALL),
    ],
)
def test_the_smallest_limit_of_the_control_groups_counts(root: Path, line: str, files: dict[str, str], most: int):
    put(root, "proc/self/cgroup", f"1:name=systemd:/\n{line}\n")
    for name, text in files.items():
        put(root, f"sys/fs/cgroup/{name}", text)
    assert found() == most
