import os
from hashlib import sha256
from pathlib import Path

import pytest

from storage.local_files.object_cache import Copies
from storage.local_files.shared_cache import cache_folder

pytestmark = pytest.mark.usefixtures("own_cache")


def digest(data: bytes) -> str:
    return sha256(data).hexdigest()


def keep(copies: Copies, data: bytes, *, used: int) -> None:
    """Add a copy whose last use was at this second."""
    copies.keep(digest(data), data)
    os.utime(cache_folder("things") / digest(data), (used, used))


def total() -> int:
    return sum(path.stat().st_size for path in cache_folder("things").iterdir())


def test_what_was_kept_is_found_by_its_content_by_any_process():
    Copies("things", 100).keep(digest(b"content"), b"content")
    assert Copies("things", 100).read(digest(b"content")) == b"content"
    assert Copies("things", 100).read(digest(b"other")) is None


def test_a_copy_that_something_has_changed_is_not_there():
    copies = Copies("things", 100)
    copies.keep(digest(b"content"), b"content")
    (cache_folder("things") / digest(b"content")).write_bytes(b"CONTENT")
    assert copies.read(digest(b"content")) is None
    copies.keep(digest(b"content"), b"content")
    assert copies.read(digest(b"content")) == b"content"


def test_what_was_used_longest_ago_makes_room():
    copies = Copies("things", 100)
    contents = [b"%d" % n * 30 for n in range(5)]
    for n in range(3):
        keep(copies, contents[n], used=n)
    assert copies.read(digest(contents[0]))  # so its last use is now
    copies.keep(digest(contents[3]), contents[3])
    assert [copies.read(digest(data)) is not None for data in contents] == [True, False, True, True, False]
    assert total() <= 100


def test_copies_of_earlier_processes_count_and_so_does_what_they_left_unfinished():
    for n in range(3):
        keep(Copies("things", 100), b"%d" % n * 30, used=n)
    unfinished = cache_folder("things") / f".{digest(b'x')}.0123456789ab"
    unfinished.write_bytes(b"x" * 50)
    os.utime(unfinished, (0, 0))
    Copies("things", 100).keep(digest(b"new"), b"new")
    assert not unfinished.exists()
    assert total() <= 100


def test_no_more_is_kept_than_the_budget_allows():
    for limit, kept in ((0, False), (6, False), (7, True)):
        copies = Copies(f"things-{limit}", limit)
        copies.keep(digest(b"content"), b"content")
        assert (copies.read(digest(b"content")) is not None) == kept


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    copies = Copies("things", 100)
    copies.keep(digest(b"content"), b"content")
    assert copies.read(digest(b"content")) is None
    assert list(cache_folder("things").iterdir()) == []
