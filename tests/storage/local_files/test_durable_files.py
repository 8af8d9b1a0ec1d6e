"""Files that appear whole or not at all, and locks of folders."""

import errno
import os
import threading
from pathlib import Path

import pytest

from storage.local_files.durable_files import linked_beside, locked_folder, written_beside


@pytest.mark.parametrize("from_file", [False, True])
def test_content_lies_beside_its_final_name_until_it_is_no_longer_needed(tmp_path: Path, from_file: bool):
    (source := tmp_path / "source").write_bytes(b"content")
    final = tmp_path / "new" / "folder" / "name"
    with written_beside(final, source if from_file else b"content") as temporary:
        assert temporary.parent == final.parent and temporary.name.startswith(".name.")
        assert temporary.read_bytes() == b"content"
        assert not final.exists()
        os.link(temporary, final)
    assert os.listdir(final.parent) == ["name"]


@pytest.mark.parametrize("another_disk", [False, True])
def test_a_file_that_never_changes_is_linked_where_that_is_possible(
    tmp_path: Path, another_disk: bool, monkeypatch: pytest.MonkeyPatch
):
    (source := tmp_path / "source").write_bytes(b"content")
    final, link = tmp_path / "new" / "folder" / "name", os.link

    def refuse(*_: Path) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    if another_disk:
        monkeypatch.setattr(os, "link", refuse)
    with linked_beside(final, source) as temporary:
        assert temporary.parent == final.parent and temporary.name.startswith(".name.")
        assert temporary.samefile(source) != another_disk and temporary.read_bytes() == b"content"
        link(temporary, final)
    assert os.listdir(final.parent) == ["name"] and source.read_bytes() == b"content"


def test_a_failure_of_the_caller_leaves_no_file(tmp_path: Path):
    with pytest.raises(ValueError, match="oops"), written_beside(tmp_path / "name", b"content"):
        raise ValueError("oops")
    assert os.listdir(tmp_path) == []


def test_one_at_a_time_holds_the_lock_of_a_folder(tmp_path: Path):
    order: list[str] = []

    def second() -> None:
        with locked_folder(tmp_path):
            order.append("second")

    thread = threading.Thread(target=second)
    with locked_folder(tmp_path):
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
