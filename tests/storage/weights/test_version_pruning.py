"""Pruning of versions: which are kept, and what interrupted writes and removals leave."""

from dataclasses import replace
from pathlib import Path

import pytest

from storage import layout
from storage.objects import manifest_folders
from storage.runs import retention
from storage.runs.retention import given_up
from storage.runs.run import Run
from storage.weights.checkpoints import Checkpoints
from storage.weights.versions import Versions
from tba.errors import StorageError, Superseded
from tba.types import Version
from tests.support.faults.uploads import begin_upload
from tests.support.storage.published_versions import publish, weights
from tests.support.stores import only_s3

local = pytest.mark.parametrize("root", ["local"], indirect=True)


@local
def test_pruning_keeps_the_newest_the_reference_the_evaluated_and_what_a_checkpoint_names(run: Run, tmp_path: Path):
    publish(run, tmp_path, *((number, 1) for number in range(14)))
    for sync in (0, 7):
        for key in (layout.draws(sync, 1), layout.steps(sync, 1)):
            run.store.create(key, b"")
        Checkpoints(run).save(sync, 1, 2 * sync, weights(tmp_path, sync))
    removed = Versions(run).prune(keep=2, every=5)
    kept = [0, 5, 7, 10, 12, 13]
    assert [version.number for version in Versions(run).complete()] == kept
    assert [version.number for version in removed] == [n for n in range(14) if n not in kept]
    assert given_up(run).versions == set(removed)
    assert Versions(run).prune(keep=2, every=5) == []
    assert len(run.store.list(layout.RETENTION)) == 1


@local
def test_pruning_after_a_restart_lets_the_older_attempt_fade(run: Run, tmp_path: Path):
    publish(run, tmp_path, (0, 1), (11, 1), (12, 1), (13, 1), (13, 2))
    Versions(run).prune(keep=3, every=100)
    assert Versions(run).complete() == [Version(0, 1), Version(12, 1), Version(13, 1), Version(13, 2)]
    publish(run, tmp_path, (14, 2), (15, 2))
    Versions(run).prune(keep=3, every=100)
    assert Versions(run).complete() == [Version(0, 1), Version(13, 2), Version(14, 2), Version(15, 2)]


@local
def test_in_step_an_older_attempts_versions_stay_as_long_as_rounds_may_need_them(run: Run, tmp_path: Path):
    run = replace(run, config={"sync": {"lag": 1}})
    publish(run, tmp_path, (0, 1), (11, 1), (12, 1), (13, 1), (13, 2))
    Versions(run).prune(keep=3, every=100)
    older = [Version(number, 1) for number in (0, 11, 12, 13)]
    assert Versions(run).complete() == [*older, Version(13, 2)]
    publish(run, tmp_path, (14, 2), (15, 2))
    Versions(run).prune(keep=3, every=100)
    assert Versions(run).complete() == [Version(0, 1), Version(13, 1), *(Version(it, 2) for it in (13, 14, 15))]


@local
def test_nothing_is_removed_before_the_record_of_it_stands(run: Run, tmp_path: Path):
    publish(run, tmp_path, *((number, 1) for number in range(4)))
    retention = Path(run.url) / "retention"
    retention.write_text("a file where the folder should be")
    with pytest.raises(StorageError, match="retention"):
        Versions(run).prune(keep=1, every=100)
    assert len(Versions(run).complete()) == 4
    retention.unlink()
    assert len(Versions(run).prune(keep=1, every=100)) == 2


def test_pruning_sweeps_up_after_interrupted_writes_and_removals(run: Run, tmp_path: Path):
    publish(run, tmp_path, *((number, 1) for number in range(4)))
    run.store.delete(f"{layout.version(Version(1, 1))}MANIFEST.json")
    being_written = f"{layout.version(Version(4, 1))}model.safetensors"
    run.store.upload(weights(tmp_path, "half") / "model.safetensors", being_written)
    assert Versions(run).prune(keep=3, every=100) == []
    assert run.store.list(layout.version(Version(1, 1))) == []
    assert run.store.exists(being_written)


@local
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_version_swept_up_while_a_superseded_trainer_stores_its_manifest_does_not_exist(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
):
    """Manifest and sweep may come in either order. The process that looks last removes the rest."""
    publish(run, tmp_path, (0, 1), (1, 1), (1, 2), (2, 2))
    old, new = Versions(Run.open(run.url)), Versions(run)
    doomed = layout.version(Version(2, 1))
    if moment == "before":
        create = old.run.store.create

        def too_late(key: str, data: bytes) -> None:
            if key.startswith(doomed):
                new.prune(keep=2, every=100)
            create(key, data)

        monkeypatch.setattr(old.run.store, "create", too_late)
        with pytest.raises(Superseded, match=r"000002-a0001.* was removed while it was written"):
            old.publish(Version(2, 1), step=4, folder=weights(tmp_path, "old"), weights_sha256="")
    else:
        run.store.upload(weights(tmp_path, "old") / "model.safetensors", f"{doomed}model.safetensors")
        delete = run.store.delete

        def too_early(key: str) -> None:
            monkeypatch.undo()
            delete(key)
            run.store.create(f"{doomed}MANIFEST.json", run.store.read(f"{layout.version(Version(2, 2))}MANIFEST.json"))

        monkeypatch.setattr(run.store, "delete", too_early)
        assert Version(2, 1) in new.prune(keep=3, every=100)
        assert Version(2, 1) in given_up(run).versions
    assert run.store.list(doomed) == []
    assert new.complete()[-2:] == [Version(1, 2), Version(2, 2)]


@local
def test_pruning_frees_what_killed_writers_left_on_the_disk(run: Run, tmp_path: Path):
    publish(run, tmp_path, *((number, 1) for number in range(1, 6)))
    for version in (Version(2, 1), Version(3, 1), Version(6, 1), Version(9, 0)):  # pruned, kept, future, impossible
        left = Path(run.url) / layout.version(version) / ".model.safetensors.0123456789ab"
        left.parent.mkdir(exist_ok=True)
        left.write_bytes(b"half")
    Versions(run).prune(keep=3, every=100)
    assert sorted(path.name for path in (Path(run.url) / layout.VERSIONS).iterdir()) == [
        "000003-a0001", "000004-a0001", "000005-a0001", "000006-a0001"
    ]  # fmt: skip


@only_s3
def test_pruning_ends_uploads_that_nobody_will_complete(run: Run, tmp_path: Path):
    publish(run, tmp_path, (1, 1), (2, 1))
    abandoned, live = (f"{layout.version(version)}model.safetensors" for version in (Version(1, 0), Version(3, 1)))
    for key in (abandoned, live):
        begin_upload(run.store, key)
    assert run.store.unfinished(layout.VERSIONS) == [abandoned, live]
    Versions(run).prune(keep=2, every=100)
    assert run.store.unfinished(layout.VERSIONS) == [live]


@local
def test_a_version_that_is_completed_just_before_the_sweep_stays(run: Run, tmp_path: Path):
    publish(run, tmp_path, (2, 1))
    run.store.upload(
        weights(tmp_path, (1, 1)) / "model.safetensors", f"{layout.version(Version(1, 1))}model.safetensors"
    )
    found = manifest_folders.survey(run.store, layout.VERSIONS)
    assert found.unfinished == [Version(1, 1)]
    publish(run, tmp_path, (1, 1))
    assert retention.keep_only(run, layout.VERSIONS, found, lambda: found.complete, why="a test") == []
    assert Versions(run).load(Version(1, 1)).is_dir()
