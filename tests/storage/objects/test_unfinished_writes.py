"""Writes that are killed or refused: content is durable before its name, and what is left is found and freed."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from storage.objects.store import Entry, Store
from tba.errors import StorageError
from tests.support.faults.uploads import begin_upload
from tests.support.stores import only_s3

only_local = pytest.mark.parametrize("root", ["local"], indirect=True)


@only_local
@pytest.mark.parametrize("write", ["create", "upload", "replace", "replace again"])
def test_content_is_durable_before_its_name_and_its_name_before_the_write_returns(
    store: Store, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str
):
    (tmp_path / "source").write_bytes(b"content")
    tag = store.replace("folder/name", b"before", tag=None) if write == "replace again" else None
    store.create("folder/other", b"")  # so that the folder exists before
    done: list[tuple[str, str]] = []

    def recorded(call: str, place: int) -> None:
        original = getattr(os, call)

        def record(*arguments: Any, **named: Any) -> object:
            at = os.readlink(f"/proc/self/fd/{arguments[0]}") if call == "fsync" else os.fspath(arguments[place])
            done.append((call, Path(at).name))
            return original(*arguments, **named)

        monkeypatch.setattr(os, call, record)

    recorded("fsync", 0)
    recorded("link", 1)
    recorded("replace", 1)
    if write == "create":
        store.create("folder/name", b"content")
    elif write == "upload":
        store.upload(tmp_path / "source", "folder/name")
    else:
        store.replace("folder/name", b"content", tag=tag)
    monkeypatch.undo()
    (first, temporary), naming, last = done
    assert first == "fsync" and temporary.startswith(".name.")
    assert naming == ("link" if write in ("create", "replace") else "replace", "name")
    assert last == ("fsync", "folder")


@only_local
def test_the_folders_of_a_first_write_are_durable_too(store: Store, monkeypatch: pytest.MonkeyPatch):
    flushed: list[str] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    store.create("new/folder/name", b"")
    assert {"root", "new", "folder"} <= set(flushed)


def test_what_killed_writers_left_is_found_and_freed(store: Store):
    store.create("a/whole", b"x")
    assert store.unfinished() == []
    for key in ("a/part", "a/part", "a/partner", "b/c/part"):
        begin_upload(store, key)
    assert store.unfinished() == ["a/part", "a/partner", "b/c/part"]
    assert store.unfinished("a/") == ["a/part", "a/partner"]
    assert store.unfinished("z/") == []
    for key in ("a/part", "a/part", "b/c/part", "z/nothing"):
        store.discard(key)
    assert store.unfinished() == ["a/partner"]
    assert store.list() == [Entry("a/whole", 1)]


@only_s3
def test_a_listing_of_uploads_longer_than_a_page_is_whole(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("storage.objects.s3.unfinished_uploads.UPLOADS_PER_PAGE", 3)
    for n in range(8):
        begin_upload(store, f"many/{n // 2}")
    assert store.unfinished("many/") == [f"many/{n}" for n in range(4)]
    store.discard("many/2")
    assert store.unfinished("many/") == ["many/0", "many/1", "many/3"]


@only_local
def test_a_torn_write_is_invisible(store: Store, root: str):
    writer = (
        "import sys\n"
        "from storage.objects.open_store import open_store\n"
        "store = open_store(sys.argv[1])\n"
        "print('go', flush=True)\n"
        "for n in range(1000): store.create(f'torn/{n:04d}', b'x' * (8 << 20))\n"
    )
    for _ in range(4):
        with subprocess.Popen([sys.executable, "-c", writer, root], stdout=subprocess.PIPE) as process:
            assert process.stdout
            process.stdout.readline()
            time.sleep(0.05)
            process.kill()
        for entry in store.list():
            assert store.read(entry.key) == b"x" * (8 << 20)
            store.delete(entry.key)
    assert store.list() == []


@only_local
def test_what_a_dead_writer_left_is_neither_listed_nor_in_the_way(store: Store, root: str):
    store.create("a/b", b"x")
    (Path(root) / "a" / ".c.1234").write_bytes(b"half")
    assert [entry.key for entry in store.list()] == ["a/b"]
    store.create("a/c", b"whole")
    assert store.read("a/c") == b"whole"


@only_local
def test_a_folder_that_vanishes_while_others_write_into_it_is_made_again(store: Store):
    def churn(racer: int) -> None:
        for n in range(50):
            store.create(f"deep/er/{racer}-{n}", b"x")
            store.delete(f"deep/er/{racer}-{n}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(churn, range(4)))
    assert store.list() == []


@only_local
def test_what_the_disk_refuses_names_the_object(store: Store, root: str):
    store.create("file", b"x")
    with pytest.raises(StorageError, match="file/below"):
        store.create("file/below", b"y")
