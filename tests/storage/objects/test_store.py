"""Promises of every store, tested on a folder, a simulated S3 and a real one."""

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from storage.objects.local_store import LocalStore
from storage.objects.open_store import open_store, probe
from storage.objects.store import Entry, Store
from tba.errors import AlreadyExists, Conflict, Missing
from tests.support.stores import CEPH


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


def test_a_local_store_says_where_an_object_lies(tmp_path: Path):
    store = LocalStore(tmp_path)
    store.create("a/b", b"x")
    path = store.local_path("a/b")
    assert path is not None
    assert path.read_bytes() == b"x"
