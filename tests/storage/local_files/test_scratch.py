"""Scratch folders are removed, however their processes end."""

import signal
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from storage.local_files.scratch import remove_left, scratch_folder

HOLDS = """
import time
from storage.local_files.scratch import scratch_folder
with scratch_folder() as folder:
    (folder / "weights").write_text("much")
    print(folder, flush=True)
    time.sleep(30)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_scratch_folder_goes_with_its_use_also_where_that_fails(temporary: Path):
    with pytest.raises(FileNotFoundError, match="of its user"), scratch_folder() as folder:
        (folder / "weights").write_text("much")
        raise FileNotFoundError("of its user")
    assert list(temporary.iterdir()) == []


def test_what_a_killed_process_left_is_removed_by_the_next_and_nothing_that_is_in_use(temporary: Path):
    (temporary / "another").mkdir()
    with (
        subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True) as process,
        scratch_folder() as mine,
    ):
        assert process.stdout
        theirs = Path(process.stdout.readline().strip())
        with scratch_folder() as third:
            assert {it.name for it in temporary.iterdir()} == {"another", mine.name, theirs.name, third.name}
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (theirs / "weights").exists()
        with scratch_folder():
            assert mine.exists() and not theirs.exists()


def test_a_folder_inside_another_is_hidden_and_what_was_left_there_is_removed(temporary: Path):
    (inside := temporary / "run").mkdir()
    (left := inside / ".tba-scratch-left").mkdir()
    with scratch_folder(inside) as folder, scratch_folder(inside) as second:
        assert folder.parent == inside and folder.name.startswith(".") and not left.exists()
        assert {it.name for it in inside.iterdir()} == {folder.name, second.name}
    assert list(inside.iterdir()) == []


def test_what_was_left_inside_a_folder_is_removed_without_a_new_one_if_it_is_of_this_machine(temporary: Path):
    (inside := temporary / "run").mkdir()
    with scratch_folder(inside) as folder:
        name = folder.name
        remove_left(inside)
        assert folder.exists(), "it is in use"
    (inside / name).mkdir()  # as if its process had been killed
    host = socket.gethostname()
    others = {inside / name.replace(host, other) for other in ("elsewhere", f"{host}-2", f"{host}.lan", f"my-{host}")}
    for other in others:
        other.mkdir()
    assert len(others) == 4 and inside / name not in others
    remove_left(inside)
    assert set(inside.iterdir()) == others


def test_no_folder_is_taken_from_a_process_that_is_just_making_it(temporary: Path):
    def use(number: int) -> bool:
        with scratch_folder() as folder:
            (folder / "mine").write_text(str(number))
            return (folder / "mine").read_text() == str(number)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(use, range(400)))
    assert list(temporary.iterdir()) == []
