"""Only regular files are objects. Any other file under the name of an object is reported and not opened."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import storage
from storage import layout
from storage.buffer.arrivals import Arrivals
from storage.log.payloads import Payloads
from storage.log.trajectories import Trajectories
from storage.maintenance.check import check
from storage.objects.local_store import LocalStore
from storage.objects.store import Entry
from storage.runs.events import Events, read_events
from storage.runs.held_lease import HeldLease
from storage.runs.run import Run
from storage.weights.attempt_claim import claim_attempt
from storage.weights.versions import Versions
from tba.errors import Damaged, Missing, StorageError
from tba.types import Version
from tests.support.builders import make_shard
from tests.support.faults.irregular import KINDS, Kind, put_irregular, within_patience
from tests.support.storage.synthetic import copy_run, make_run

each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(str(tmp_path_factory.mktemp("root")))


@pytest.fixture
def run(finished: Run, tmp_path: Path) -> Run:
    """Return a copy of a finished run that a test may change."""
    return copy_run(finished, tmp_path)


READS: list[Callable[[LocalStore, Path], object]] = [
    lambda store, copy: store.read("a/name"),
    lambda store, copy: store.read_many(["a/name"]),
    lambda store, copy: store.read_range("a/name", 0, 10),
    lambda store, copy: store.download("a/name", copy),
]
WRITES: list[Callable[[LocalStore, Path], object]] = [
    lambda store, source: store.create("a/name", b"x"),
    lambda store, source: store.replace("a/name", b"x", tag=None),
    lambda store, source: store.upload(source, "a/name"),
]


@each_kind
def test_what_is_no_regular_file_is_no_object(tmp_path: Path, kind: Kind):
    store = LocalStore(tmp_path / "root")
    store.create("a/object", b"content")
    put_irregular(tmp_path / "root/a/name", kind)
    put_irregular(tmp_path / "root/b/name", kind)
    for read in READS:
        with pytest.raises(Missing, match=r"a/name does not exist: a .* of that name is not an object$"):
            within_patience(lambda read=read: read(store, tmp_path / "copy"))
    assert within_patience(lambda: store.read_tagged("a/name")) is None
    assert not store.exists("a/name")
    assert store.list() == store.list("a/") == [Entry("a/object", 7)]
    assert store.folders() == ["a"]
    assert store.irregular() == ["a/name", "b/name"]
    assert store.irregular("a/") == ["a/name"]


@each_kind
def test_nothing_is_written_over_what_is_no_object_and_nothing_of_it_removed(tmp_path: Path, kind: Kind):
    store = LocalStore(tmp_path / "root")
    put_irregular(path := tmp_path / "root/a/name", kind)
    before = path.lstat()
    (tmp_path / "source").write_bytes(b"x")
    for write in WRITES:
        with pytest.raises(StorageError, match=r"a/name is a .*, but an object must be a regular file: move it away$"):
            within_patience(lambda write=write: write(store, tmp_path / "source"))
    store.delete("a/name")
    assert path.lstat() == before
    assert store.unfinished() == []


def test_a_link_to_a_file_is_that_file(tmp_path: Path):
    store = LocalStore(tmp_path / "root")
    store.create("a/name", b"content")
    (tmp_path / "root/a/link").symlink_to("name")
    assert store.read("a/link") == b"content"
    assert store.list() == [Entry("a/link", 7), Entry("a/name", 7)]
    assert store.irregular() == []


def test_a_pipe_in_the_place_of_a_lock_makes_nobody_wait(tmp_path: Path):
    store = LocalStore(tmp_path)
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(StorageError, match="name: No such device or address"):
        within_patience(lambda: store.replace("name", b"x", tag=None))


@each_kind
def test_check_tells_of_it_and_a_query_passes_over_it(run: Run, kind: Kind):
    keys = {
        layout.shard(7, 0), layout.shard(0, 99), layout.sync(99), layout.draws(99, 1), layout.attempt(99),
        layout.event("trainer", 1, 999), layout.evaluation(Version(99, 1)), layout.retention(99), layout.prompts("x"),
        layout.lease("trainer"), layout.version(Version(99, 1)) + layout.MANIFEST,
    }  # fmt: skip
    for key in keys:
        put_irregular(Path(run.url) / key, kind)
    put_irregular(Path(run.url) / "notes.txt", kind)
    findings = within_patience(lambda: check(run))
    assert {(it.key, it.problem) for it in findings.problems} == {
        (key, "is no regular file: nothing can be stored or read under this name until it is moved") for key in keys
    }
    assert "notes.txt is not part of a run" in findings.notes

    def count() -> list[Any]:
        con = storage.connect(run)
        return con.sql("select (select count(*) from trajectories), (select count(*) from events)").fetchall()

    assert within_patience(count) == [(7 * 2 * 2 * 3, len(read_events(run)))]


@each_kind
def test_an_object_that_something_else_has_replaced_is_missing(run: Run, kind: Kind):
    key = layout.shard(0, 0)
    (Path(run.url) / key).unlink()
    put_irregular(Path(run.url) / key, kind)
    findings = within_patience(lambda: check(run))
    assert next(it.problem for it in findings.problems if it.key == key).startswith("is missing")


@each_kind
def test_no_role_waits_for_it(run: Run, kind: Kind):
    shard, lease = layout.shard(5, 0), layout.lease("searcher-005")
    for key in (shard, lease, layout.attempt(3), layout.event("searcher-005", 1, 0)):
        put_irregular(Path(run.url) / key, kind)
    arrivals = Arrivals(run, Payloads(run, memory_bytes=0, disk_bytes=0), lambda table: None)
    within_patience(arrivals.look)
    assert shard not in arrivals.found and shard not in arrivals.refused
    for act, key in (
        (lambda: HeldLease(run, "searcher-005", every=1.0), lease),
        (lambda: Trajectories(run).append(5, 0, make_shard({"a": [0.0]}, searcher=5)), shard),
        (lambda: claim_attempt(run), layout.attempt(3)),
    ):
        with pytest.raises(StorageError, match=f"{key} is a "):
            within_patience(act)
    within_patience(lambda: Events(run, "searcher-005", 1).write("started", "it lives"))


@each_kind
def test_a_version_that_holds_it_in_the_place_of_an_empty_file_is_damaged(run: Run, tmp_path: Path, kind: Kind):
    """Both the empty file and the irregular file have no bytes."""
    (folder := tmp_path / "weights").mkdir()
    (folder / "empty").touch()
    version = Version(9, 2)
    Versions(run).publish(version, step=18, folder=folder, weights_sha256="0" * 64)
    path = Path(run.url) / layout.version(version) / "empty"
    path.unlink()
    put_irregular(path, kind)
    with pytest.raises(Damaged, match=r"empty is gone, but its manifest names it"):
        within_patience(lambda: Versions(run).load(version))
