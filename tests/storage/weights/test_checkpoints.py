"""Checkpoints are complete, with their ledger, or do not exist."""

from hashlib import sha256
from pathlib import Path

import pytest

from storage import layout
from storage.maintenance.check import check
from storage.runs.retention import given_up
from storage.runs.run import Run
from storage.weights.attempt_claim import claim_attempt
from storage.weights.checkpoints import Checkpoints
from tba.errors import Damaged, Missing, StorageError, Superseded
from tba.types import Version
from tests.support.faults.checkpoint_damage import DAMAGES, OPTIMIZER, damage
from tests.support.storage.saved_checkpoints import save, state

local = pytest.mark.parametrize("root", ["local"], indirect=True)


def test_a_checkpoint_comes_back_as_it_was(run: Run, tmp_path: Path):
    save(run, tmp_path, 5, 1)
    assert (Checkpoints(run).load(5, 1) / "state.json").read_text() == "{}"
    with pytest.raises(Missing, match="000006-a0001"):
        Checkpoints(run).load(6, 1)


@local
@pytest.mark.parametrize("there", [[], [layout.draws(5, 1)], [layout.steps(5, 1)], [layout.draws(5, 2)]])
def test_a_checkpoint_without_its_ledger_is_refused(run: Run, tmp_path: Path, there: list[str]):
    for key in there:
        run.store.create(key, b"")
    with pytest.raises(StorageError, match=r"before (draws|steps)/000005-a0001"):
        Checkpoints(run).save(5, 1, 10, state(tmp_path))
    assert Checkpoints(run).complete() == []


def test_a_checkpoint_has_the_parts_that_other_processes_have_stored(run: Run, tmp_path: Path):
    part = tmp_path / "optimizer-00001-of-00002.safetensors"
    part.write_text("moments")
    entry = Checkpoints(run).save_part(0, 1, part, sha256=sha256(b"moments").hexdigest())
    assert Checkpoints(run).complete() == []
    Checkpoints(run).save(0, 1, 0, state(tmp_path), stored=[entry])
    folder = Checkpoints(run).load(0, 1)
    assert (folder / part.name).read_text() == "moments" and (folder / "state.json").read_text() == "{}"


@local
@pytest.mark.parametrize(
    ("stored", "changes", "error"), [(False, {}, Superseded), (True, {"sha256": "0" * 64}, Damaged)]
)
def test_a_checkpoint_without_a_part_or_with_another_is_refused(
    run: Run, tmp_path: Path, stored: bool, changes: dict[str, str], error: type[Exception]
):
    part = tmp_path / "optimizer-00001-of-00002.safetensors"
    part.write_text("moments")
    entry = {"name": part.name, "bytes": 7, "sha256": sha256(b"moments").hexdigest(), **changes}
    if stored:
        Checkpoints(run).save_part(0, 1, part, sha256=entry["sha256"])
    with pytest.raises(error):
        Checkpoints(run).save(0, 1, 0, state(tmp_path), stored=[entry])
        Checkpoints(run).load(0, 1)


@local
def test_the_checkpoint_of_the_start_needs_no_ledger(run: Run, tmp_path: Path):
    Checkpoints(run).save(0, 1, 0, state(tmp_path))
    assert Checkpoints(run).complete() == [Version(0, 1)]


def test_pruning_keeps_the_newest_of_the_chain(run: Run, tmp_path: Path):
    claim_attempt(run)
    for sync in (2, 4, 6):
        save(run, tmp_path, sync, 1)
    claim_attempt(run)
    save(run, tmp_path, 8, 1)  # no attempt continues this checkpoint
    save(run, tmp_path, 8, 2)
    removed = Checkpoints(run).prune(keep=2)
    assert Checkpoints(run).complete() == [Version(6, 1), Version(8, 2)]
    assert removed == [Version(2, 1), Version(4, 1), Version(8, 1)]
    assert given_up(run).checkpoints == set(removed)
    assert Checkpoints(run).newest() == Version(8, 2)


@local
def test_pruning_never_removes_the_only_way_back(run: Run, tmp_path: Path):
    claim_attempt(run)
    assert Checkpoints(run).prune(keep=1) == []
    save(run, tmp_path, 2, 1)
    assert Checkpoints(run).prune(keep=1) == []
    assert Checkpoints(run).newest() == Version(2, 1)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_is_not_loaded_and_the_file_is_named(run: Run, tmp_path: Path, how: str):
    save(run, tmp_path, 5, 1)
    run.store.create(layout.sync(5), b'{"step": 10}')
    damage(run, Version(5, 1), how)
    name, _, said = DAMAGES[how]
    with pytest.raises(Damaged, match=f"checkpoints/000005-a0001/{name}.*{said}"):
        Checkpoints(run).load(5, 1)


@local
@pytest.mark.parametrize("how", DAMAGES)
def test_pruning_does_not_count_a_damaged_checkpoint_and_leaves_it_where_it_is(run: Run, tmp_path: Path, how: str):
    claim_attempt(run)
    for sync in (2, 4, 6):
        save(run, tmp_path, sync, 1)
        run.store.create(layout.sync(sync), b'{"step": %d}' % (2 * sync))
    damage(run, Version(6, 1), how)
    assert Checkpoints(run).prune(keep=1) == [Version(2, 1)]
    assert Checkpoints(run).complete() == [Version(4, 1), Version(6, 1)]
    assert claim_attempt(run).continues == Version(4, 1)


def test_pruning_does_not_count_a_checkpoint_that_lacks_a_file(run: Run, tmp_path: Path):
    claim_attempt(run)
    for sync in (2, 4, 6):
        save(run, tmp_path, sync, 1)
    damage(run, Version(6, 1), "no tokenizer")
    assert Checkpoints(run).prune(keep=1) == [Version(2, 1)]


@local
def test_pruning_gives_up_nothing_where_no_checkpoint_is_intact(run: Run, tmp_path: Path):
    claim_attempt(run)
    for sync in (2, 4):
        save(run, tmp_path, sync, 1)
        damage(run, Version(sync, 1))
    assert Checkpoints(run).prune(keep=1) == []
    assert len(Checkpoints(run).complete()) == 2


@local
def test_what_a_resumed_trainer_passed_over_is_pruned_once_it_has_checkpoints_of_its_own(run: Run, tmp_path: Path):
    claim_attempt(run)
    for sync in (2, 4):
        save(run, tmp_path, sync, 1)
    damage(run, Version(4, 1))
    assert claim_attempt(run).continues == Version(2, 1)
    save(run, tmp_path, 4, 2)
    assert Checkpoints(run).prune(keep=2) == [Version(4, 1)]
    assert Checkpoints(run).complete() == [Version(2, 1), Version(4, 2)]
    assert given_up(run).checkpoints == {Version(4, 1)}


def test_check_names_a_damaged_checkpoint_and_its_file(run: Run, tmp_path: Path):
    save(run, tmp_path, 5, 1)
    damage(run, Version(5, 1))
    key = f"{layout.checkpoint(Version(5, 1))}"
    [problem] = [str(it) for it in check(run).problems if key in str(it)]
    assert OPTIMIZER in problem and "sha256 differs" in problem
