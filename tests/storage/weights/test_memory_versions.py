"""Versions that a trainer offers in main memory: what searchers load, and when they count as stored."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from storage import layout
from storage.objects import records
from storage.runs.run import Run
from storage.weights import memory_versions
from storage.weights.memory_versions import MemoryVersions, open_memory
from storage.weights.versions import Versions
from tba.errors import ConfigError, Damaged, Missing, RunFailed
from tba.types import Version
from tests.support.storage.published_versions import weights

pytestmark = pytest.mark.parametrize("root", ["local"], indirect=True)
V0, V1, V2, V3 = (Version(number, 1) for number in range(4))


@pytest.fixture
def trainer(run: Run) -> Iterator[MemoryVersions]:
    with open_memory(run) as versions:
        yield versions


@pytest.fixture
def searcher(run: Run) -> Iterator[MemoryVersions]:
    with open_memory(run) as versions:
        yield versions


def offer(trainer: MemoryVersions, version: Version, content: str = "") -> Path:
    folder = trainer.memory / f"of {version}"
    folder.mkdir()
    (folder / "model.safetensors").write_text(content or str(version))
    trainer.offer(version, folder)
    return folder


def publish(trainer: MemoryVersions, version: Version, folder: Path) -> None:
    trainer.publish(version, step=2 * version.number, folder=folder, weights_sha256="")


def content(folder: Path) -> str:
    return (folder / "model.safetensors").read_text()


def test_a_searcher_loads_a_version_before_it_is_stored_without_another_copy(run: Run, trainer, searcher):
    offered = offer(trainer, V1)
    assert searcher.newest() == V1
    assert Versions(run).newest() is None
    loaded = searcher.load(V1)
    assert content(loaded) == str(V1)
    assert (loaded / "model.safetensors").stat().st_ino == (offered / "model.safetensors").stat().st_ino


def test_a_version_counts_as_stored_once_the_store_has_what_was_loaded(run: Run, trainer, searcher):
    offered = offer(trainer, V1)
    searcher.load(V1)
    assert not searcher.is_stored(V1)
    publish(trainer, V1, offered)
    assert searcher.is_stored(V1)
    assert content(Versions(run).load(V1)) == str(V1)


def test_other_content_in_the_store_is_not_what_was_loaded(run: Run, tmp_path: Path, trainer, searcher):
    offer(trainer, V1)
    searcher.load(V1)
    Versions(run).publish(V1, step=2, folder=weights(tmp_path, "other"), weights_sha256="")
    with pytest.raises(RunFailed, match=f"version {V1}, loaded from memory, is stored with other content"):
        searcher.is_stored(V1)


def test_a_version_of_a_trainer_that_died_before_storing_it_is_never_stored(run: Run, trainer, searcher):
    offer(trainer, V1)
    searcher.load(V1)
    run.store.create(layout.attempt(2), records.encode({"continues": None, "created_at": records.now()}))
    with pytest.raises(RunFailed, match=f"version {V1}, loaded from memory, was not stored before attempt 2 began"):
        searcher.is_stored(V1)


def test_a_version_that_was_stored_and_pruned_since_counts_as_stored(run: Run, trainer, searcher):
    folders = [offer(trainer, version) for version in (V1, V2, V3)]
    searcher.load(V1)
    for version, folder in zip((V1, V2, V3), folders, strict=True):
        publish(trainer, version, folder)
    Versions(run).prune(keep=2, every=10)
    assert V1 not in Versions(run).complete()
    assert searcher.is_stored(V1)


def test_what_a_superseded_trainer_offers_does_not_count(run: Run, trainer, searcher):
    publish(trainer, V1, offer(trainer, V1))
    offer(trainer, V2)
    assert searcher.newest() == V2
    run.store.create(layout.attempt(2), records.encode({"continues": None, "created_at": records.now()}))
    assert searcher.newest() == V1


def test_files_that_the_trainer_has_hashed_are_not_read_again(trainer, searcher, monkeypatch: pytest.MonkeyPatch):
    offer(trainer, V1)
    monkeypatch.setattr("storage.local_files.verified_files.sha256_of_file", lambda path: pytest.fail(f"reads {path}"))
    assert content(searcher.load(V1)) == str(V1)


def test_weights_that_are_not_those_the_trainer_wrote_are_refused(trainer, searcher):
    offered = offer(trainer, V1)
    (offered / "model.safetensors").write_text("000001-a0002")
    with pytest.raises(Damaged, match=f"model.safetensors of version {V1} is in memory, but not as"):
        searcher.load(V1)


def test_what_was_loaded_stays_after_the_trainer_has_withdrawn_it(trainer, searcher):
    offered = offer(trainer, V1)
    loaded = searcher.load(V1)
    shutil.rmtree(offered)
    assert content(loaded) == str(V1)
    assert searcher.newest() is None


def test_a_version_that_is_no_longer_offered_is_loaded_from_the_store(trainer, searcher):
    publish(trainer, V1, offered := offer(trainer, V1))
    shutil.rmtree(offered)
    assert searcher.newest() == V1
    assert not searcher.load(V1).is_relative_to(memory_versions.MEMORY)
    assert searcher.is_stored(V1)
    with pytest.raises(Missing):
        searcher.load(V2)


def test_a_searcher_keeps_the_two_versions_that_it_has_loaded_last(trainer, searcher):
    loaded = []
    for version in (V1, V2, V3):
        offer(trainer, version)
        loaded.append(searcher.load(version))
    assert [it.exists() for it in loaded] == [False, True, True]


def test_the_reference_is_a_stored_version_because_trajectories_name_it(trainer, searcher):
    offered = offer(trainer, V0)
    assert searcher.reference() is None
    publish(trainer, V0, offered)
    assert searcher.reference() == V0


def test_a_process_that_ends_during_a_look_does_not_disturb_it(trainer, searcher, monkeypatch: pytest.MonkeyPatch):
    offer(trainer, V1)
    gone = trainer.memory.with_name(".tba-scratch-of-a-process-that-has-ended")
    folders = [gone, *trainer.memory.parent.iterdir()]
    monkeypatch.setattr(type(gone), "iterdir", listing(folders, trainer.memory.parent))
    assert searcher.newest() == V1


def listing(folders: list[Path], of: Path) -> Callable[[Path], Iterator[Path]]:
    listed = Path.iterdir
    return lambda self: iter(folders) if self == of else listed(self)


def test_memory_without_room_for_four_versions_is_refused_before_any_is_written(trainer):
    free = shutil.disk_usage(trainer.memory).free
    trainer.check_room(free // 100, differences=True)
    for differences, many in ((False, 4), (True, 5)):
        with pytest.raises(ConfigError, match=rf"^sync.transport: .* needs room for {many} versions, "):
            trainer.check_room(free // many + 2**30, differences=differences)


KILLED = """
import os, sys
from pathlib import Path
from storage.runs.run import Run
from storage.weights.memory_versions import open_memory
with open_memory(Run.open(sys.argv[1])) as versions:
    print(versions.memory, flush=True)
    sys.stdin.read()
"""


def test_the_memory_of_a_killed_process_is_freed_by_the_next_run_of_the_user(run: Run, root: str):
    other = Run.create(root, "other", config={}, sampler_sql="", code_version="")
    command = [sys.executable, "-c", KILLED, other.url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        memory = Path(process.stdout.readline().strip())
        assert memory.exists()
        with open_memory(run):
            assert memory.exists()
        process.send_signal(signal.SIGKILL)
    with open_memory(run):
        assert not memory.exists()


def test_a_folder_that_others_can_enter_is_refused(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory_versions, "MEMORY", tmp_path)
    owner, other = tmp_path / f"tba-{os.getuid()}", tmp_path / "of another user"
    other.mkdir(mode=0o700)
    for make in (lambda: owner.mkdir(mode=0o755), lambda: owner.symlink_to(other)):
        make()
        with pytest.raises(ConfigError, match=r"^sync.transport: .* only this user can enter"), open_memory(run):
            pass
        owner.unlink() if owner.is_symlink() else owner.rmdir()
    assert not list(other.iterdir())


def test_a_machine_without_shared_memory_is_refused(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory_versions, "MEMORY", tmp_path / "none")
    with pytest.raises(ConfigError, match=r"^sync.transport: shared-memory needs .*: No such file"), open_memory(run):
        pass
