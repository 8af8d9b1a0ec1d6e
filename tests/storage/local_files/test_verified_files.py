"""A file is verified once on a machine, and again as soon as it may have changed."""

import multiprocessing
import os
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from storage.local_files import verified_files
from storage.local_files.verified_files import KIND, has_sha256, settle

CONTENT = b"weights" * 100
DIGEST = sha256(CONTENT).hexdigest()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Return a list that gets the path of each file that is read whole."""
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "cache"))
    found: list[Path] = []
    read = verified_files.sha256_of_file

    def counted(path: Path) -> str:
        found.append(path)
        return read(path)

    monkeypatch.setattr(verified_files, "sha256_of_file", counted)
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (path := tmp_path / "file").write_bytes(CONTENT)
    settle(path)
    return path


def test_a_file_is_read_once_and_each_time_without_trust(file: Path, reads: list[Path]):
    assert all(has_sha256(file, DIGEST, trusts_marks=True) for _ in range(3))
    assert reads == [file]
    assert has_sha256(file, DIGEST, trusts_marks=False) and len(reads) == 2


def test_a_link_is_the_same_file_and_a_copy_is_another(file: Path, reads: list[Path], tmp_path: Path):
    has_sha256(file, DIGEST, trusts_marks=True)
    os.link(file, tmp_path / "link")
    (tmp_path / "copy").write_bytes(CONTENT)
    os.utime(tmp_path / "copy", ns=(0, file.stat().st_mtime_ns))
    assert has_sha256(tmp_path / "link", DIGEST, trusts_marks=True) and reads == [file]
    assert has_sha256(tmp_path / "copy", DIGEST, trusts_marks=True) and reads == [file, tmp_path / "copy"]


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"x")


def exchange(path: Path) -> None:
    path.with_name("other").write_bytes(b"x" * len(CONTENT))
    os.replace(path.with_name("other"), path)


@pytest.mark.parametrize("change", [overwrite, exchange, lambda path: path.write_bytes(b"x")])
def test_a_file_that_has_changed_is_read_again(file: Path, reads: list[Path], change: Callable[[Path], object]):
    assert has_sha256(file, DIGEST, trusts_marks=True)
    change(file)
    assert not has_sha256(file, DIGEST, trusts_marks=True)
    assert len(reads) == 2


def test_a_file_with_another_content_gets_no_mark(file: Path, reads: list[Path]):
    for _ in range(2):
        assert not has_sha256(file, "0" * 64, trusts_marks=True)
    assert has_sha256(file, DIGEST, trusts_marks=True) and len(reads) == 3


def test_a_file_that_has_just_changed_gets_no_mark(file: Path, reads: list[Path]):
    file.write_bytes(CONTENT)
    assert all(has_sha256(file, DIGEST, trusts_marks=True) for _ in range(2))
    assert len(reads) == 2


def test_after_a_restart_of_the_machine_no_mark_counts(file: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch):
    has_sha256(file, DIGEST, trusts_marks=True)
    monkeypatch.setattr(verified_files, "_start_of_machine", lambda: "another start")
    assert has_sha256(file, DIGEST, trusts_marks=True) and len(reads) == 2


def test_without_a_cache_every_file_is_read(file: Path, reads: list[Path], tmp_path: Path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert all(has_sha256(file, DIGEST, trusts_marks=True) for _ in range(2))
    assert len(reads) == 2


def test_a_mark_counts_for_a_day(file: Path, reads: list[Path], tmp_path: Path):
    has_sha256(file, DIGEST, trusts_marks=True)
    [mark] = (tmp_path / "cache" / KIND).iterdir()
    os.utime(mark, (time.time() - 2 * 24 * 3600,) * 2)
    assert has_sha256(file, DIGEST, trusts_marks=True) and len(reads) == 2


def test_old_marks_are_removed(file: Path, reads: list[Path], tmp_path: Path):
    has_sha256(file, DIGEST, trusts_marks=True)
    [mark] = (tmp_path / "cache" / KIND).iterdir()
    os.utime(mark, (0, time.time() - 2 * 24 * 3600))
    has_sha256(file, "0" * 64, trusts_marks=True)
    assert not mark.exists()


def _verify(path: Path, said: "multiprocessing.SimpleQueue[str]") -> None:
    read = verified_files.sha256_of_file

    def slow(path: Path) -> str:
        said.put("read")
        time.sleep(0.5)
        return read(path)

    verified_files.sha256_of_file = slow
    said.put(str(has_sha256(path, DIGEST, trusts_marks=True)))


def test_of_processes_that_verify_at_the_same_time_one_reads(file: Path, tmp_path: Path, reads: list[Path]):
    context = multiprocessing.get_context("fork")
    said: multiprocessing.SimpleQueue[str] = context.SimpleQueue()
    processes = [context.Process(target=_verify, args=(file, said)) for _ in range(4)]
    for process in processes:
        process.start()
    answers = sorted(said.get() for _ in range(5))
    for process in processes:
        process.join()
    assert answers == ["True"] * 4 + ["read"]
