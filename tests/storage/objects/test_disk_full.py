"""A full disk gives a clear error that names the object, and leaves nothing half-written. With room, work continues."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.servers import Server
from storage import layout
from storage.log.ledger import ParquetLedger
from storage.log.trajectories import Trajectories
from storage.maintenance.check import check
from storage.objects.local_store import LocalStore
from storage.objects.manifest_folders import local_copy
from storage.objects.open_store import open_store
from storage.objects.store import Store
from storage.queries.mirror import take_snapshot
from storage.runs.attempts import newest_attempt
from storage.runs.control import change_state, read_state
from storage.runs.events import Events
from storage.runs.held_lease import HeldLease
from storage.runs.leases import read_lease
from storage.runs.retention import give_up
from storage.runs.run import Run
from storage.weights.attempt_claim import claim_attempt
from storage.weights.checkpoints import Checkpoints
from storage.weights.evaluations import Evaluations
from storage.weights.versions import Versions
from tba.errors import StorageError
from tba.types import Score, Version
from tests.conftest import s3_root
from tests.support.builders import make_shard
from tests.support.faults.small_disk import PAGE, Disk, small_disk
from tests.support.storage.synthetic import EVERY, SyntheticRun, fill


@pytest.fixture(params=["bytes", "names"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    room = {"bytes": "size=2m", "names": "nr_inodes=400"}[request.param]
    with small_disk(tmp_path / "disk", room, request.param) as disk:
        yield disk


def refused(action: Callable[[], Any], key: str) -> None:
    with pytest.raises(StorageError, match="No space left on device") as caught:
        action()
    assert key in str(caught.value)


# --- the store --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", ["create", "replace", "replace again", "upload", "upload again"])
def test_a_write_without_room_changes_nothing_and_succeeds_when_there_is_some(disk: Disk, tmp_path: Path, write: str):
    store = LocalStore(disk.folder)
    source = tmp_path / "source"
    source.write_bytes(content := b"new" * 10_000)
    tag = store.replace("a/key", b"old", tag=None) if write.endswith("again") else None
    act = {
        "create": lambda: store.create("a/key", content),
        "replace": lambda: store.replace("a/key", content, tag=tag),
        "upload": lambda: store.upload(source, "a/key"),
    }[write.partition(" ")[0]]
    before = disk.files()
    for room in (0, 3) if disk.lacks == "bytes" else (0,):
        disk.fill(room)
        refused(act, "a/key")
        assert disk.files() == before
        assert store.unfinished() == []
        if tag:
            assert store.read_tagged("a/key") == (b"old", tag)
        disk.free()
    act()
    assert store.read("a/key") == content


def test_a_download_without_room_leaves_nothing_and_says_where(disk: Disk, tmp_path: Path):
    store = LocalStore(tmp_path / "store")
    store.create("a/key", b"content" * 10_000)
    disk.fill(3 if disk.lacks == "bytes" else 0)
    refused(lambda: store.download("a/key", disk.folder / "copy"), f"a/key cannot be written to {disk.folder}/copy")
    assert disk.files() == {}
    disk.free()
    store.download("a/key", disk.folder / "copy")
    assert disk.files() == {"copy": b"content" * 10_000}


def test_a_file_larger_than_a_process_may_write_is_an_error_that_names_it(tmp_path: Path):
    """This needs no small disk: a process limit on file sizes does the same."""
    script = (
        "import resource, sys\n"
        "from storage.objects.local_store import LocalStore\n"
        "from tba.errors import StorageError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))\n"
        "store = LocalStore(sys.argv[1])\n"
        "store.create('small', b'x' * 10_000)\n"
        "try: store.create('large', b'x' * 10_001)\n"
        "except StorageError as error: print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True).stdout
    assert said == f"{tmp_path}/large: File too large\n"
    assert os.listdir(tmp_path) == ["small"]


# --- what lies on top -------------------------------------------------------------------------------------------------


@pytest.fixture
def made(disk: Disk) -> SyntheticRun:
    """Return a run after its first sync."""
    made = SyntheticRun(str(disk.folder), "first").begin()
    made.buffer(1).sync(0, step=0)
    return made


def append(made: SyntheticRun, folder: Path) -> Callable[[], object]:
    shard = make_shard({"train/0": [1.0] * 50}, round=1)
    return lambda: Trajectories(made.run).append(0, 1, shard)


def record(made: SyntheticRun, folder: Path) -> Callable[[], object]:
    made.search(version=0)
    buffer = made.buffer(1)
    buffer.sync(0, step=0)
    return lambda: buffer.sync(1, step=EVERY)


def ledger(made: SyntheticRun, folder: Path) -> Callable[[], object]:
    buffer = made.buffer(1)
    buffer.sync(0, step=0)
    steps = [made.step(step, 1, buffer.draw(step), 1) for step in (1, 2)]
    buffer.sync(1, step=EVERY)
    written = ParquetLedger(made.run, 1)
    return lambda: written.write(1, steps, weights_sha256="ab")


def publish(made: SyntheticRun, folder: Path) -> Callable[[], object]:
    fill(str(folder), "weights" * 100)
    return lambda: Versions(made.run).publish(Version(0, 2), step=0, folder=folder, weights_sha256="")


def checkpoint(made: SyntheticRun, folder: Path) -> Callable[[], object]:
    fill(str(folder), "state" * 100)
    return lambda: Checkpoints(made.run).save(0, 1, 0, folder)


def attempt(made: SyntheticRun, folder: Path) -> Callable[[], object]:
    return lambda: claim_attempt(made.run)


def state(made: SyntheticRun, folder: Path) -> Callable[[], object]:
    return lambda: change_state(made.run, searchers=1)


def scores(made: SyntheticRun, folder: Path) -> Callable[[], object]:
    made.publish(Version(0, 2))
    score = Score(version=Version(0, 2), step=0, metric="greedy", value=0.5, n=1, seconds=1.0)
    return lambda: Evaluations(made.run).write([score])


def retention(made: SyntheticRun, folder: Path) -> Callable[[], object]:
    return lambda: give_up(made.run, versions=[Version(0, 9)], why="a test")


def lease(made: SyntheticRun, folder: Path) -> Callable[[], object]:
    return lambda: HeldLease(made.run, "searcher-000", every=60).close()


Layer = Callable[[SyntheticRun, Path], Callable[[], object]]

LAYERS: list[tuple[Layer, str]] = [
    (append, layout.shard(0, 1)),
    (record, layout.sync(1)),
    (ledger, "000001-a0001"),
    (publish, layout.version(Version(0, 2))),
    (checkpoint, layout.checkpoint(Version(0, 1))),
    (attempt, ""),
    (state, layout.STATE),
    (scores, layout.evaluation(Version(0, 2))),
    (retention, layout.retention(1)),
    (lease, layout.lease("searcher-000")),
]


@pytest.mark.parametrize(("layer", "key"), LAYERS, ids=[layer.__name__ for layer, _ in LAYERS])
def test_whatever_is_written_without_room_is_not_there_by_halves_and_can_be_written_again(
    disk: Disk,
    made: SyntheticRun,
    tmp_path: Path,
    layer: Callable[[SyntheticRun, Path], Callable[[], object]],
    key: str,
):
    """The room grows from try to try, so that each time a later write fails."""
    (tmp_path / "source").mkdir()
    act = layer(made, tmp_path / "source")
    stored = what_is_complete(made.run)
    room = 0
    while True:
        disk.fill(room)
        try:
            act()
        except StorageError as error:
            assert key in str(error) and "No space left on device" in str(error)
        else:
            break
        assert what_is_complete(made.run) == stored
        assert made.run.store.unfinished() == []
        room += 1
    assert room > 0
    disk.free()
    assert what_is_complete(made.run) != stored
    assert check(made.run).problems == []


def what_is_complete(run: Run) -> Any:
    """Return everything that is complete: versions and checkpoints with a manifest, ledgers with a record, and
    records."""
    names = [entry.key for entry in run.store.list()]
    parts = (layout.VERSIONS, layout.CHECKPOINTS, layout.DRAWS, layout.STEPS, layout.EVENTS, "control/probe/")
    whole = [name for name in names if not name.startswith(parts) or name.endswith(layout.MANIFEST)]
    lease = read_lease(run, "searcher-000")
    return whole, newest_attempt(run), read_state(run), lease and lease.counter


def test_a_role_whose_lease_cannot_be_renewed_goes_on_and_renews_it_once_there_is_room(disk: Disk, made: SyntheticRun):
    with HeldLease(made.run, "trainer", every=0.01) as held:
        disk.fill()
        refused(lambda: made.run.store.create("control/other", b"x" * PAGE), "control/other")
        before = read_lease(made.run, "trainer")
        held.tell("turn 2")
        held.check()
        disk.free()
        while True:
            now = read_lease(made.run, "trainer")
            if now and now.status == "turn 2":
                break
            held.check()
    assert before and now.counter > before.counter and now.life == before.life


def test_an_event_without_room_is_logged_and_stops_nobody(
    disk: Disk, made: SyntheticRun, caplog: pytest.LogCaptureFixture
):
    disk.fill()
    Events(made.run, "trainer", 1).write("started", "it lives")
    assert "event started was not stored" in caplog.text and "No space left on device" in caplog.text


# --- copies of what is remote -----------------------------------------------------------------------------------------


@pytest.fixture
def remote(disk: Disk, moto: Server, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Return a remote store, with the cache on the small disk."""
    monkeypatch.setenv("TBA_CACHE", str(disk.folder / "cache"))
    return open_store(s3_root(moto, monkeypatch), deadline=20)


def test_a_download_that_fits_only_in_part_is_an_error_and_leaves_nothing(
    disk: Disk, remote: Store, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("storage.objects.s3.file_transfers.PART", 10 * PAGE + 100)
    remote.create("a/key", content := os.urandom(25 * PAGE))
    for room in (0, 1, 5, 12, 24) if disk.lacks == "bytes" else (0,):
        disk.fill(room)
        refused(lambda: remote.download("a/key", disk.folder / "copy"), f"a/key cannot be written to {disk.folder}")
        assert disk.files() == {}
        disk.free()
    remote.download("a/key", disk.folder / "copy")
    assert disk.files() == {"copy": content}


def weights_and_parts(disk: Disk) -> list[str]:
    return sorted(name for name in disk.files() if "safetensors" in name or ".part" in name)


def test_a_cache_without_room_is_an_error_that_names_what_did_not_fit(disk: Disk, remote: Store, tmp_path: Path):
    """Publishing succeeds, but then the version is not in the cache."""
    made = SyntheticRun(remote.url, "first").begin()
    Path(tmp_path, "weights").mkdir()
    Path(tmp_path, "weights", "model.safetensors").write_bytes(os.urandom(25 * PAGE))
    prefix, before = layout.version(Version(1, 1)), weights_and_parts(disk)
    disk.fill(12 if disk.lacks == "bytes" else 0)
    Versions(made.run).publish(Version(1, 1), step=EVERY, folder=tmp_path / "weights", weights_sha256="")
    refused(lambda: local_copy(made.run.store, prefix), str(disk.folder / "cache"))
    disk.fill()
    refused(lambda: take_snapshot(made.run), str(disk.folder / "cache"))
    assert weights_and_parts(disk) == before
    disk.free()
    assert (local_copy(made.run.store, prefix) / "model.safetensors").stat().st_size == 25 * PAGE
    assert layout.shard(0, 0) in take_snapshot(made.run).files
