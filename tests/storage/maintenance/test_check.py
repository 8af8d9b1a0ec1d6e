"""The check finds objects that are damaged or unexpected, and reports nothing in progress."""

import hashlib
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pyarrow.parquet as pq
import pytest

from storage import layout
from storage.maintenance.check import check
from storage.maintenance.check.shards import check_shards
from storage.maintenance.compactor import compact
from storage.objects import manifest_folders
from storage.runs.retention import give_up
from storage.runs.run import Run
from tba.types import Eligibility, Version
from tests.support.faults.check_problems import reports
from tests.support.storage.compacted import replayed, save_checkpoint
from tests.support.storage.indexes import make_eligibility
from tests.support.storage.stored_objects import path_of
from tests.support.storage.synthetic import (
    LAST_SYNC,
    PROMPTS,
    STEPS,
    STRANGERS,
    B,
    K,
    S,
    copy_run,
    make_live_run,
    make_run,
    prune_version,
    put,
)
from tests.support.storage.synthetic_forks import fork
from tests.support.stores import long_on_s3


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(str(tmp_path_factory.mktemp("root")))


@pytest.fixture
def whole(finished: Run, tmp_path: Path) -> Run:
    """Return a copy of a finished run that a test may damage."""
    return copy_run(finished, tmp_path)


@pytest.fixture
def parent(finished: Run, tmp_path: Path) -> Run:
    """Return a copy in a root of its own, in which forks can be made."""
    return copy_run(finished, tmp_path / "runs")


def flip(run: Run, key: str, place: float = 0.5) -> None:
    """Change one byte."""
    data = bytearray(run.store.read(key))
    data[int(len(data) * place)] ^= 0xFF
    path_of(run, key).write_bytes(data)


# --- nothing is wrong -------------------------------------------------------------------------------------------------


@long_on_s3
def test_a_whole_run_is_clean_on_every_store(root: str):
    findings = check(make_run(root))
    assert findings.problems == []
    assert findings.checked == {
        "attempts": 2,
        "sync records": 5,
        "shards": 12,
        "trajectories": 14 * 2 * S,
        "versions": 7,
        "checkpoints": 2,
        "evaluations": 3,
        "ledger objects": 2 * 5,
        "ledger records": 5,
        "steps": STEPS,
        "draws": STEPS * B * K,
        "prompts": len(PROMPTS) + 1,
        "events": findings.checked["events"],
    }


def test_shards_that_wait_and_attempts_that_were_given_up_are_only_noted(whole: Run):
    notes = "\n".join(check(whole).notes)
    assert "2 shards with 12 trajectories have arrived since the last sync" in notes
    assert "that a later attempt repeated after a crash: 1" in notes


def test_a_live_run_is_clean(tmp_path: Path):
    findings = check(make_live_run(str(tmp_path)))
    assert findings.ok
    assert any("not yet those up to record" in note for note in findings.notes)


def test_a_run_that_has_only_begun_is_clean(tmp_path: Path):
    assert check(Run.create(str(tmp_path), "new", config={}, sampler_sql="", code_version="")).ok


def test_a_ledger_of_which_a_killed_trainer_wrote_only_half_is_only_noted(whole: Run):
    whole.store.delete(layout.ledger(3, 1))
    whole.store.delete(layout.steps(3, 1))
    findings = check(whole)
    assert findings.ok and any("half the ledger" in note for note in findings.notes)


def test_a_version_that_was_given_up_is_not_missed(whole: Run):
    prune_version(whole, Version(1, 1))
    assert check(whole).ok


def test_an_upload_without_a_manifest_is_only_noted(whole: Run):
    path = path_of(whole, "versions/000009-a0002/model.safetensors")
    path.parent.mkdir()
    path.write_bytes(b"half")
    findings = check(whole)
    assert findings.ok
    assert any("versions/000009-a0002/ is unfinished" in note for note in findings.notes)


def test_what_is_not_part_of_a_run_is_only_noted(whole: Run):
    for name in STRANGERS:
        put(whole, name, b"x")
    findings = check(whole)
    assert findings.problems == []
    noted = {note.removesuffix(" is not part of a run") for note in findings.notes}
    assert len(noted & {*STRANGERS}) == 20
    assert f"{len(STRANGERS) - 20} more objects are not part of a run" in findings.notes


def test_a_write_that_was_never_finished_is_only_noted(whole: Run):
    (Path(whole.url) / "versions/000004-a0002/.model.safetensors.0123456789ab").write_bytes(b"half")
    findings = check(whole)
    assert findings.ok
    assert any(
        "never finished, the first is of versions/000004-a0002/model.safetensors" in note for note in findings.notes
    )


def test_progress_ends_at_all_of_it(whole: Run):
    told: list[tuple[int, int]] = []
    check(whole, progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1]


@pytest.mark.parametrize("moment", ["check_shards", "shards.read_compactions", "compactions.CompactedRows.open_object"])
@pytest.mark.parametrize("drop_beyond", [None, make_eligibility(2)])
def test_a_run_that_is_compacted_meanwhile_is_clean(
    whole: Run, moment: str, drop_beyond: Eligibility | None, monkeypatch: pytest.MonkeyPatch
):
    """The run is compacted, and another process compacts it again before or after a call in the check."""
    compact(whole, keep_checkpoints=2)
    for after in (False, True):
        run = copy_run(whole, Path(whole.url).with_name(f"after-{after}"))
        name = f"storage.maintenance.check.{moment}"
        done, usual = [], resolve_name(name)

        def meanwhile(*asked: Any, run=run, after=after, done=done, usual=usual, **named: Any) -> Any:
            found = usual(*asked, **named) if after else None
            if not done:
                done.append(True)
                done += compact(run, keep_checkpoints=1, drop_beyond=drop_beyond).written
            return found if after else usual(*asked, **named)

        with monkeypatch.context() as patch:
            patch.setattr(name, meanwhile)
            findings = check(run)
        assert findings.problems == []
        assert findings.checked["trajectories"] == 14 * 2 * S
        assert len(done) == 2
        assert check(run).problems == []


@pytest.mark.parametrize("moment", ["listing", "check_shards", "shards.check_waiting_shards"])
def test_shards_that_are_admitted_and_compacted_meanwhile_are_not_missed(
    whole: Run, moment: str, monkeypatch: pytest.MonkeyPatch
):
    name = f"storage.maintenance.check.{moment}"
    usual = whole.store.list if moment == "listing" else resolve_name(name)

    def go_on() -> None:
        monkeypatch.undo()
        replayed(whole).sync(LAST_SYNC + 1, step=100)
        save_checkpoint(whole, LAST_SYNC + 1, step=100)
        assert compact(whole, keep_checkpoints=1).shards == 14

    def meanwhile(*asked: Any, **named: Any) -> None:
        go_on()
        usual(*asked, **named)

    def listed(prefix: str = "", **others: Any) -> Any:
        if prefix == layout.COMPACTIONS:
            go_on()
        return usual(prefix, **others)

    if moment == "listing":
        monkeypatch.setattr(whole.store, "list", listed)
    else:
        monkeypatch.setattr(name, meanwhile)
    assert check(whole).problems == []
    assert not whole.store.exists(layout.shard(0, 6))


def test_an_object_of_many_shards_is_read_once(whole: Run, monkeypatch: pytest.MonkeyPatch):
    usual, read = whole.store.read, []

    def meanwhile(*asked: Any, **named: Any) -> None:
        compact(whole, keep_checkpoints=1)
        monkeypatch.setattr(whole.store, "read", lambda key: (read.append(key), usual(key))[1])
        check_shards(*asked, **named)

    monkeypatch.setattr("storage.maintenance.check.check_shards", meanwhile)
    assert check(whole).problems == []
    assert len([key for key in read if key.endswith(".parquet") and key.startswith(layout.COMPACTIONS)]) == 1


def test_a_check_changes_nothing(whole: Run):
    digests = {entry.key: hashlib.sha256(whole.store.read(entry.key)).hexdigest() for entry in whole.store.list()}
    check(whole)
    after = {entry.key: hashlib.sha256(whole.store.read(entry.key)).hexdigest() for entry in whole.store.list()}
    assert after == digests


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0.02, 0.3, 0.5, 0.9, 0.999])
def test_a_flipped_byte_of_a_shard_is_found(whole: Run, place: float):
    flip(whole, layout.shard(1, 2), place)
    findings = check(whole)
    assert reports(findings, layout.shard(1, 2), "sha256")
    assert len(findings.problems) == 1


@pytest.mark.parametrize(
    ("key", "column"),
    [
        (layout.draws(2, 1), "trajectory_id"),
        (layout.draws(2, 1), "residual"),
        (layout.draws(3, 1), "age"),
        (layout.steps(4, 2), "loss"),
        (layout.steps(4, 2), "weights_sha256"),
        (layout.prompts("train"), "answer"),
    ],
)
def test_a_flipped_byte_of_any_value_of_the_ledger_or_the_prompts_is_found(whole: Run, key: str, column: str):
    footer = pq.read_metadata(path_of(whole, key))
    place = footer.schema.names.index(column)
    pages = footer.row_group(0).column(place)
    end = (pages.dictionary_page_offset or pages.data_page_offset) + pages.total_compressed_size
    data = bytearray(whole.store.read(key))
    data[end - 1] ^= 0xFF
    path_of(whole, key).write_bytes(data)
    assert reports(check(whole), key)


@pytest.mark.parametrize("key", [layout.draws(2, 1), layout.steps(4, 2), layout.prompts("train")])
def test_a_truncated_ledger_or_prompts_are_found(whole: Run, key: str):
    path_of(whole, key).write_bytes(whole.store.read(key)[:-7])
    assert reports(check(whole), key)


@pytest.mark.parametrize("name", ["versions/000002-a0002", "versions/000001-a0001", "checkpoints/000002-a0001"])
def test_a_flipped_byte_of_weights_is_found(whole: Run, name: str):
    flip(whole, f"{name}/model.safetensors")
    assert reports(check(whole), name, "model.safetensors")


def test_a_flipped_byte_of_a_difference_is_found_though_whoever_published_it_has_the_version(whole: Run):
    assert manifest_folders.local_copy(whole.store, "versions/000004-a0002/").is_dir()
    flip(whole, "versions/000004-a0002/model.safetensors.xor.zst")
    [problem] = check(whole).problems
    assert problem.key == "versions/000004-a0002/" and "model.safetensors.xor.zst" in problem.problem


def test_damage_of_a_checkpoint_that_was_given_up_and_is_kept_for_a_fork_is_found(parent: Run):
    fork(parent, 2)
    start = Version(2, 1)
    give_up(parent, checkpoints=[start], why="before the fork was looked for")
    assert check(parent).ok
    flip(parent, layout.checkpoint(start) + "model.safetensors")
    assert reports(check(parent), layout.checkpoint(start), "model.safetensors")


@pytest.mark.parametrize("prefix", [layout.VERSIONS, layout.CHECKPOINTS])
def test_what_is_given_up_and_removed_meanwhile_is_only_noted(whole: Run, prefix: str, monkeypatch: pytest.MonkeyPatch):
    name, checker = Version(2, 1), f"storage.maintenance.check.check_{prefix.rstrip('/')}"
    usual = resolve_name(checker)

    def meanwhile(*asked: Any) -> Any:
        if prefix == layout.VERSIONS:
            give_up(whole, versions=[name], why="a test")
        else:
            give_up(whole, checkpoints=[name], why="a test")
        manifest_folders.remove(whole.store, f"{prefix}{name}/")
        return usual(*asked)

    monkeypatch.setattr(checker, meanwhile)
    findings = check(whole)
    assert findings.problems == []
    assert f"{prefix}{name}/ is being removed" in findings.notes


def test_a_truncated_shard_is_found(whole: Run):
    path = path_of(whole, layout.shard(0, 1))
    path.write_bytes(path.read_bytes()[:-7])
    assert reports(check(whole), layout.shard(0, 1), "bytes")


def test_a_damaged_shard_that_waits_is_found(whole: Run):
    flip(whole, layout.shard(0, 6))
    assert reports(check(whole), layout.shard(0, 6))


@pytest.mark.parametrize(
    "key",
    [
        layout.sync(2),
        layout.attempt(2),
        layout.evaluation(Version(2, 1)),
        layout.STATE,
        layout.event("trainer", 2, 0),
        "versions/000004-a0002/MANIFEST.json",
    ],
)
def test_a_record_that_is_no_json_is_found(whole: Run, key: str):
    path_of(whole, key).write_text('{"sync": 2,')
    assert reports(check(whole), key.removesuffix("MANIFEST.json"), "JSON")


def test_a_record_that_cannot_be_read_is_not_called_missing(whole: Run):
    path_of(whole, layout.sync(2)).write_text("{")
    assert not reports(check(whole), layout.sync(2), "missing")


def test_an_object_that_this_process_may_not_read_is_found(whole: Run, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("storage.objects.manifest_folders.local_copy", refuse)
    assert reports(check(whole), "versions/000002-a0002/", "cannot be read: Permission denied")
