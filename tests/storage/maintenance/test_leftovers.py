"""What killed writers left goes after a day; what is younger, or of a living writer, or not ours at all, stays."""

import fcntl
import os
import threading
import time
from functools import partial
from pathlib import Path

import pytest

import storage
from storage import layout
from storage.local_files.object_cache import Copies
from storage.local_files.shared_cache import cache_folder
from storage.local_files.temporary_files import A_DAY
from storage.maintenance.leftovers import sweep
from storage.objects.local_store import LocalStore
from storage.objects.s3.store import S3Store
from storage.objects.store import Store
from storage.runs.events import Events, read_events
from storage.runs.run import Run
from tests.support.faults.uploads import begin_upload
from tests.support.storage.synthetic import SyntheticRun

only_local = pytest.mark.parametrize("root", ["local"], indirect=True)
only_moto = pytest.mark.parametrize("root", ["moto"], indirect=True)

STRANGERS = (
    ".hidden", ".name.0123456789ab.part", ".name.0123456789AB", ".name.0123456789a", ".name.0123456789abc",
    "name.0123456789ab", ".a b.0123456789ab", "..0123456789ab", ".lock",
)  # fmt: skip
"""Names that are almost those of our temporary files."""


def put_temporary(folder: Path, name: str, *, days: float) -> Path:
    """Something that was written last so long ago."""
    folder.mkdir(parents=True, exist_ok=True)
    (path := folder / name).write_bytes(b"half")
    then = time.time() - days * A_DAY
    os.utime(path, (then, then))
    return path


@only_local
def test_of_a_folder_only_old_temporary_files_of_ours_are_removed(store: LocalStore):
    old = [put_temporary(store.folder / it, ".name.0123456789ab", days=1.1) for it in ("a", "a/b", "c")]
    kept = [put_temporary(store.folder / "a", name, days=100) for name in ("name", *STRANGERS)]
    kept += [put_temporary(store.folder / "a", f".{n}.0123456789ab", days=days) for n, days in enumerate((0, 0.9, -9))]
    (folder := store.folder / "a/.folder.0123456789ab").mkdir()
    (link := store.folder / "a/.link.0123456789ab").symlink_to("name")
    os.mkfifo(pipe := store.folder / "a/.pipe.0123456789ab")
    kept += [folder, link, pipe]
    for path in (folder, link, pipe):
        os.utime(path, (0, 0), follow_symlinks=False)
    assert store.discard_older("a/", A_DAY) == ["a/b/name", "a/name"]
    assert [path.exists() for path in old] == [False, False, True]
    assert store.discard_older("", A_DAY) == ["c/name"]
    assert all(os.path.lexists(path) for path in kept)


@only_local
def test_the_file_of_a_writer_that_lives_is_left_however_old_it_is(store: LocalStore):
    """The writer waits for the lock of the folder, which somebody else holds."""
    (folder := store.folder / "a").mkdir(parents=True)
    with (folder / ".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        writer = threading.Thread(target=partial(store.replace, "a/name", b"content", tag=None))
        writer.start()
        while not (found := list(folder.glob(".name.*"))) or not found[0].stat().st_size:
            time.sleep(0.01)
        os.utime(found[0], (0, 0))
        assert store.discard_older("", A_DAY) == []
    writer.join()
    assert store.read("a/name") == b"content"
    assert list(folder.glob(".name.*")) == []


@only_moto
def test_of_a_bucket_only_uploads_that_have_rested_are_freed(store: Store):
    """benchmarks/harness/moto_server.py tells of some that they began, or were sent, long ago."""
    old, none = "a/begun-long-ago-sent-long-ago", "a/begun-long-ago"
    sent_lately, begun_lately = "b/begun-long-ago", "a/begun-now-sent-long-ago"
    for key in (old, sent_lately, begun_lately, "other/begun-long-ago-sent-long-ago"):
        begin_upload(store, key)
    assert isinstance(store, S3Store)
    store.requests.run(store.requests.send, "create_multipart_upload", none)
    store.create("a/object", b"x")
    assert store.discard_older("a/", A_DAY) == [none, old]
    assert store.discard_older("b/", A_DAY) == []
    kept = [begun_lately, sent_lately, "other/begun-long-ago-sent-long-ago"]
    assert store.unfinished() == kept
    assert store.discard_older("", -A_DAY) == kept  # as if a day later
    assert store.unfinished() == []
    assert store.read("a/object") == b"x"


def test_every_store_frees_what_is_old_enough_and_nothing_younger(store: Store):
    begin_upload(store, "a/name")
    assert store.discard_older("a/", A_DAY) == []
    assert store.discard_older("b/", -A_DAY) == []
    assert store.discard_older("a/", -A_DAY) == ["a/name"]  # as if a day later
    assert store.unfinished() == []


LEFT = "trajectories/searcher=003/begun-long-ago-sent-long-ago"
YOUNG = "trajectories/searcher=003/young"


def leave(run: Run) -> None:
    """What two writers of a searcher leave, one of them long ago."""
    for key in (LEFT, YOUNG):
        begin_upload(run.store, key)
    if path := run.store.local_path(LEFT):
        os.utime(path.with_name(f".{path.name}.0123456789ab"), (0, 0))


@pytest.mark.parametrize("root", ["local", "moto"], indirect=True)
@pytest.mark.parametrize("prefix", ["", layout.searcher_folder(3)])
def test_a_run_tells_by_an_event_what_was_removed(run: Run, prefix: str):
    leave(run)
    sweep(run, Events(run, "trainer", 1), layout.searcher_folder(4))
    assert read_events(run) == []
    sweep(run, Events(run, "trainer", 1), prefix)
    assert run.store.unfinished() == [YOUNG]
    (event,) = read_events(run)
    assert (event["kind"], event["data"]) == ("swept", {"number": 1, "keys": [LEFT]})
    assert event["message"] == f"unfinished writes of 1 objects, older than a day, were removed: {LEFT}"
    sweep(run, Events(run, "trainer", 2), prefix)
    assert len(read_events(run)) == 1


@only_local
def test_trouble_with_the_store_is_no_reason_to_stop(run: Run, caplog: pytest.LogCaptureFixture):
    sweep(run, Events(run, "trainer", 1), "no/../prefix")
    assert "were not removed" in caplog.text and read_events(run) == []


def test_copies_that_were_never_finished_go_after_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "cache"))
    folder = cache_folder("things")
    old, young = (put_temporary(folder, f".{n}{'0' * 63}.0123456789ab", days=n) for n in (2, 0))
    strangers = [put_temporary(folder, name, days=100) for name in STRANGERS]
    Copies("things", 10**6).keep("1" * 64, b"content")
    assert not old.exists() and young.exists() and all(it.exists() for it in strangers)


@only_moto
def test_copies_of_a_run_that_were_never_finished_go_after_a_day(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "cache"))
    run = SyntheticRun(root, "first").begin().run
    storage.connect(run).close()
    (folder,) = cache_folder("runs").iterdir()
    old = put_temporary(folder / "syncs", f".000001.json.{'0' * 16}.0123456789ab", days=2)
    young = put_temporary(folder / "syncs", f".000002.json.{'0' * 16}.0123456789ab", days=0)
    storage.connect(run).close()
    assert not old.exists() and young.exists()
