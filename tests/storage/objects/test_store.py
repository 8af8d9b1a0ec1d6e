"""Promises of every store, tested on a folder, a simulated S3 and a real one."""

import os
import string
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.objects.local_store import LocalStore
from storage.objects.open_store import open_store, probe
from storage.objects.store import Entry, Store, check_key, check_prefix
from tba.errors import AlreadyExists, ConfigError, Conflict, Missing, StorageError
from tests.support.faults.uploads import begin_upload
from tests.support.stores import CEPH, only_s3

only_local = pytest.mark.parametrize("root", ["local"], indirect=True)
# A store is shared by the examples of hypothesis; each example uses its own keys.
examples = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

parts = st.text(string.ascii_letters + string.digits + "_=.@+-", min_size=1, max_size=20).filter(
    lambda part: part[0] in string.ascii_letters + string.digits + "_"
)
keys = st.lists(parts, min_size=1, max_size=4).map("/".join)


def won(action: Callable[[], object]) -> bool:
    try:
        action()
    except (AlreadyExists, Conflict):
        return False
    return True


def race(racers: int, action: Callable[[int], object]) -> list[int]:
    """Let several threads act at once, and return which of them won."""
    with ThreadPoolExecutor(racers) as pool:
        results = list(pool.map(lambda racer: won(lambda: action(racer)), range(racers)))
    return [racer for racer, result in enumerate(results) if result]


def test_what_was_created_is_read_back(store: Store):
    store.create("a/b=1/c.json", b"\x00content")
    assert store.read("a/b=1/c.json") == b"\x00content"
    assert store.exists("a/b=1/c.json")
    assert not store.exists("a/b=1/c")
    assert not store.exists("a/b=1")


@examples
@given(data=st.binary(max_size=3000))
def test_a_round_trip_is_exact(store: Store, data: bytes):
    key = f"round/{os.urandom(8).hex()}"
    store.create(key, data)
    assert store.read(key) == data
    assert store.list("round/", after=key[:-1])[0] == Entry(key, len(data))
    store.delete(key)


@examples
@given(key=keys)
def test_every_valid_key_is_a_name_of_its_own(store: Store, key: str):
    key = f"{os.urandom(8).hex()}/{key}"
    store.create(key, key.encode())
    assert store.read(key) == key.encode()
    assert [entry.key for entry in store.list(key)] == [key]


def test_a_repeated_create_is_refused_and_changes_nothing(store: Store):
    store.create("name", b"first")
    for data in (b"second", b"first"):
        with pytest.raises(AlreadyExists, match="name"):
            store.create("name", data)
    assert store.read("name") == b"first"


def test_eight_racing_creators_leave_one_winner(store: Store):
    for attempt in range(5):
        key = f"race/{attempt}"
        winners = race(8, lambda racer, key=key: store.create(key, b"%d" % racer * 1000))
        assert len(winners) == 1
        assert store.read(key) == b"%d" % winners[0] * 1000


def test_eight_racing_replacers_leave_one_winner(store: Store):
    tag = store.replace("state", b"start", tag=None)
    for _ in range(5):
        winners = race(8, lambda racer, tag=tag: store.replace("state", b"%d" % racer + os.urandom(8), tag=tag))
        assert len(winners) == 1
        found = store.read_tagged("state")
        assert found is not None
        assert found[0][:1] == b"%d" % winners[0]
        tag = found[1]


def test_eight_racing_first_writers_of_a_state_leave_one_winner(store: Store):
    winners = race(8, lambda racer: store.replace("state", b"%d" % racer, tag=None))
    assert len(winners) == 1
    assert store.read("state") == b"%d" % winners[0]


def test_nothing_is_lost_when_many_count_together(store: Store):
    store.replace("counter", b"0", tag=None)

    def count(_: int) -> None:
        while True:
            data, tag = store.read_tagged("counter") or (b"", "")
            if won(lambda data=data, tag=tag: store.replace("counter", b"%d" % (int(data) + 1), tag=tag)):
                return

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(count, range(20)))
    assert store.read("counter") == b"20"


@pytest.mark.parametrize("root", ["local", CEPH], indirect=True)
def test_eight_racing_processes_leave_one_winner(store: Store, root: str, tmp_path: Path):
    racer = (
        "import pathlib, sys, time\n"
        "from storage.objects.open_store import open_store\n"
        "from tba.errors import AlreadyExists\n"
        "store, name, go = open_store(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])\n"
        "store.list()\n"
        "print('ready', flush=True)\n"
        "while not go.exists(): time.sleep(0.001)\n"
        "for n in range(20):\n"
        "    try: store.create(f'race/{n}', name.encode())\n"
        "    except AlreadyExists: continue\n"
        "    print(n)\n"
    )
    go = tmp_path / "go"
    racers = [
        subprocess.Popen([sys.executable, "-c", racer, root, str(name), str(go)], stdout=subprocess.PIPE, text=True)
        for name in range(8)
    ]
    for process in racers:
        assert process.stdout and process.stdout.readline() == "ready\n"
    go.touch()
    won_by = {int(n): name for name, process in enumerate(racers) for n in process.communicate()[0].split()}
    assert all(process.returncode == 0 for process in racers)
    assert {n: int(store.read(f"race/{n}")) for n in range(20)} == won_by
    assert len(store.list("race/")) == 20


def test_a_replacement_needs_the_tag_of_what_is_there(store: Store):
    first = store.replace("state", b"one", tag=None)
    assert store.read_tagged("state") == (b"one", first)
    second = store.replace("state", b"two", tag=first)
    assert store.read_tagged("state") == (b"two", second)
    for stale in (first, None, "0" * 32):
        with pytest.raises(Conflict, match="state"):
            store.replace("state", b"three", tag=stale)
    assert store.read("state") == b"two"


def test_a_replacement_of_what_is_gone_is_refused(store: Store):
    assert store.read_tagged("state") is None
    tag = store.replace("state", b"one", tag=None)
    store.delete("state")
    with pytest.raises(Conflict):
        store.replace("state", b"two", tag=tag)
    store.replace("state", b"three", tag=None)


def test_what_create_made_counts_for_replace(store: Store):
    store.create("state", b"one")
    with pytest.raises(Conflict):
        store.replace("state", b"two", tag=None)


def test_a_missing_object_is_named(store: Store, tmp_path: Path):
    for look in (
        lambda: store.read("no/such"),
        lambda: store.read_many(["no/such"]),
        lambda: store.read_range("no/such", 0, 1),
        lambda: store.download("no/such", tmp_path / "x"),
    ):
        with pytest.raises(Missing, match="no/such"):
            look()
    assert store.list() == []
    assert store.list("no/") == []
    assert store.folders("no/") == []


def test_a_folder_is_no_object(store: Store, tmp_path: Path):
    store.create("a/b", b"x")
    for name in ("a", "a/b/c"):
        assert not store.exists(name)
        assert store.read_tagged(name) is None
        store.delete(name)
        for look in (lambda name=name: store.read(name), lambda name=name: store.download(name, tmp_path / "x")):
            with pytest.raises(Missing, match=name):
                look()
    assert store.list("a/b/") == []
    assert store.read("a/b") == b"x"


def test_listing_is_sorted_complete_and_knows_where_to_go_on(store: Store):
    names = ["A", "a-b", "a/1", "a/10", "a/2", "a/b/c", "a0", "ab/1", "b=1/x", "b=1/y"]
    for name in reversed(names):
        store.create(name, name.encode())
    assert store.list() == [Entry(name, len(name)) for name in sorted(names)]
    for prefix in ("", "a", "a/", "a/1", "a/b/", "a/b/c", "b", "b=1/", "z"):
        for after in ("", "a", "a/", "a/1", "a/b/c", "a0", "b=1/x", "b=2", "z"):
            expected = sorted(name for name in names if name.startswith(prefix) and name > after)
            assert [entry.key for entry in store.list(prefix, after=after)] == expected, (prefix, after)


def test_a_part_of_an_object_is_what_lies_there(store: Store):
    store.create("ten", b"0123456789")
    parts = [(0, 10), (0, 1), (3, 4), (9, 1), (8, 5), (10, 3), (12, 1)]
    assert [store.read_range("ten", start, length) for start, length in parts] == [
        b"0123456789", b"0", b"3456", b"9", b"89", b"", b""
    ]  # fmt: skip


def test_many_objects_are_read_in_the_order_asked_for(store: Store):
    for n in range(40):
        store.create(f"many/{n}", b"%d" % n)
    order = [*range(39, -1, -1), 5]
    assert list(store.read_many([f"many/{n}" for n in order])) == [b"%d" % n for n in order]


def test_folders_are_named_once(store: Store):
    for key in ("runs/a/run.json", "runs/a/x/y", "runs/b/run.json", "runs/file", "other/z"):
        store.create(key, b"")
    assert store.folders("runs/") == ["a", "b"]
    assert store.folders() == ["other", "runs"]


def test_a_deleted_object_is_gone_and_deleting_it_again_is_done(store: Store):
    store.create("a/b/c", b"x")
    store.delete("a/b/c")
    store.delete("a/b/c")
    assert not store.exists("a/b/c")
    assert store.list() == []
    store.create("a/b/c", b"y")
    assert store.read("a/b/c") == b"y"


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (16 << 20) + 1, 40 << 20])
def test_a_large_part_comes_back_as_it_went(store: Store, tmp_path: Path, size: int):
    source, copy = tmp_path / "source", tmp_path / "deep" / "copy"
    source.write_bytes(os.urandom(size))
    store.upload(source, "part")
    store.download("part", copy)
    assert copy.read_bytes() == source.read_bytes()
    assert store.list() == [Entry("part", size)]


def test_an_upload_overwrites(store: Store, tmp_path: Path):
    for content in (b"first, and longer", b"second"):
        (tmp_path / "file").write_bytes(content)
        store.upload(tmp_path / "file", "part")
    assert store.read("part") == b"second"


def test_two_stores_of_one_folder_see_each_other(store: Store, root: str):
    other = open_store(root)
    store.create("x", b"1")
    assert other.read("x") == b"1"
    assert open_store(f"{root}/sub").list() == []
    open_store(f"{root}/sub").create("y", b"2")
    assert store.read("sub/y") == b"2"


def test_a_store_that_honours_conditions_passes_the_probe_and_is_left_clean(store: Store):
    probe(store)
    assert store.list() == []


# Keys


NOT_KEYS = [
    *("", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/../b", "a/./b", "a/..", ".hidden", "a/.hidden"),
    *("a\\b", "a b", "a\nb", "a\n", "a\x00b", "ä", "a:b", "~", "*", "a" * 201, "/".join(["abcdefgh"] * 100)),
]


@pytest.mark.parametrize("key", NOT_KEYS)
@only_local
def test_a_key_that_could_lead_elsewhere_is_refused_everywhere(store: Store, key: str, tmp_path: Path):
    for use in (
        lambda: check_key(key),
        lambda: store.create(key, b""),
        lambda: store.read(key),
        lambda: store.read_many([key]),
        lambda: store.read_range(key, 0, 1),
        lambda: store.exists(key),
        lambda: store.upload(tmp_path, key),
        lambda: store.download(key, tmp_path / "x"),
        lambda: store.delete(key),
        lambda: store.read_tagged(key),
        lambda: store.replace(key, b"", tag=None),
        lambda: store.local_path(key),
    ):
        with pytest.raises(StorageError, match="not a key"):
            use()


@given(key=st.text(max_size=40))
def test_a_key_that_is_accepted_stays_inside_the_folder(key: str):
    try:
        check_key(key)
    except StorageError:
        return
    folder = Path("/store")
    assert Path(os.path.normpath(folder / key)) == folder / key
    assert (folder / key).is_relative_to(folder)
    assert all(part and not part.startswith(".") for part in key.split("/"))


@given(key=keys, cut=st.integers(0, 80))
def test_every_start_of_a_key_is_a_prefix(key: str, cut: int):
    assert check_prefix(key[:cut]) == key[:cut]


@pytest.mark.parametrize("prefix", ["/", "..", "../", "a/../", "a//", "/a", ".", "a/."])
@only_local
def test_a_prefix_that_could_lead_elsewhere_is_refused(store: Store, prefix: str):
    for look in (store.list, store.folders):
        with pytest.raises(StorageError, match="not a key"):
            look(prefix)


@pytest.mark.parametrize("url", ["", "gs://bucket/x", "http://host/x", "s3://", "s3://a b/c", "s3:///x"])
def test_a_url_that_is_no_store_is_refused(url: str):
    with pytest.raises(ConfigError):
        open_store(url)


def test_a_path_and_a_file_url_are_the_same_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert open_store("here").url == open_store(f"file://{tmp_path}/here").url == str(tmp_path / "here")


# Unfinished writes


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


def test_a_local_store_says_where_an_object_lies(tmp_path: Path):
    store = LocalStore(tmp_path)
    store.create("a/b", b"x")
    path = store.local_path("a/b")
    assert path is not None
    assert path.read_bytes() == b"x"
