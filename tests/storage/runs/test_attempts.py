"""Attempts: which checkpoint each continues, and which attempt's ledger counts."""

import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.harness.servers import Server
from storage import layout
from storage.objects import manifest_folders
from storage.objects.open_store import open_store
from storage.runs.attempts import Span, chain, newest_attempt, read_attempt
from storage.runs.retention import GivenUpPayloads, give_up
from storage.runs.run import Run
from storage.weights.attempt_claim import claim_attempt
from storage.weights.checkpoints import Checkpoints
from tba.errors import Damaged, Missing, StorageError, UnsafeStore
from tba.types import Eligibility, Version
from tests.conftest import s3_root
from tests.support.faults.checkpoint_damage import DAMAGES, OPTIMIZER, damage, put
from tests.support.storage.saved_checkpoints import save
from tests.support.stores import long_on_s3

local = pytest.mark.parametrize("root", ["local"], indirect=True)


def test_the_first_attempt_starts_from_the_beginning(run: Run):
    assert newest_attempt(run) == 0
    assert chain(run) == []
    attempt = claim_attempt(run)
    assert (attempt.number, attempt.continues) == (1, None)
    assert newest_attempt(run) == 1
    assert chain(run) == [Span(1, 0, None)]
    assert read_attempt(run, 1) == attempt


def test_the_next_attempt_continues_the_newest_checkpoint(run: Run, tmp_path: Path):
    claim_attempt(run)
    for sync in (0, 5, 10):
        save(run, tmp_path, sync, 1)
    assert claim_attempt(run).continues == Version(10, 1)
    assert chain(run) == [Span(1, 0, 10), Span(2, 11, None)]
    assert chain(run, 1) == [Span(1, 0, None)]


@local
def test_an_attempt_without_a_checkpoint_is_left_out_of_the_chain(run: Run, tmp_path: Path):
    claim_attempt(run)
    save(run, tmp_path, 5, 1)
    claim_attempt(run)
    assert claim_attempt(run).continues == Version(5, 1)
    assert chain(run) == [Span(1, 0, 5), Span(3, 6, None)]


@local
def test_what_a_superseded_trainer_still_saves_is_not_continued(run: Run, tmp_path: Path):
    claim_attempt(run)
    save(run, tmp_path, 5, 1)
    claim_attempt(run)
    save(run, tmp_path, 10, 1)
    assert Checkpoints(run).newest() == Version(5, 1)
    assert claim_attempt(run).continues == Version(5, 1)
    save(run, tmp_path, 6, 3)
    assert Checkpoints(run).newest() == Version(6, 3)
    assert claim_attempt(run).continues == Version(6, 3)
    assert chain(run) == [Span(1, 0, 5), Span(3, 6, 6), Span(4, 7, None)]


@local
def test_a_restart_without_any_checkpoint_begins_anew(run: Run):
    claim_attempt(run)
    assert claim_attempt(run).continues is None
    assert chain(run) == [Span(2, 0, None)]


@local
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lives=st.lists(st.lists(st.integers(1, 3), max_size=3), min_size=1, max_size=6))
def test_each_sync_belongs_to_exactly_one_attempt_of_the_chain(root: str, tmp_path: Path, lives: list[list[int]]):
    """Each life of the trainer is a list of the distances between the checkpoints that it makes before it dies."""
    name = secrets.token_hex(4)
    run = Run.create(f"{root}/{name}", "r", config={}, sampler_sql="", code_version="test")
    owner = dict.fromkeys(range(40), 0)
    for life in lives:
        attempt = claim_attempt(run)
        sync = attempt.continues.number if attempt.continues else -1
        owner.update(dict.fromkeys(range(sync + 1, 40), attempt.number))
        for distance in life:
            sync += distance
            save(run, tmp_path, sync, attempt.number)
    spans = chain(run)
    for sync, attempt in owner.items():
        assert [span.attempt for span in spans if span.covers(sync)] == [attempt]


def test_eight_racing_trainers_get_eight_attempts(run: Run):
    with ThreadPoolExecutor(8) as pool:
        numbers = [attempt.number for attempt in pool.map(lambda _: claim_attempt(run), range(8))]
    assert sorted(numbers) == list(range(1, 9))
    assert newest_attempt(run) == 8


@local
def test_a_chain_that_leads_forward_is_damaged(run: Run):
    run.store.create(layout.attempt(1), b'{"attempt": 1, "continues": {"sync": 3, "attempt": 1}, "created_at": ""}')
    with pytest.raises(Damaged, match=r"attempts/0001\.json"):
        chain(run)
    with pytest.raises(Missing, match=r"attempts/0007\.json"):
        chain(run, 7)


@local
@pytest.mark.parametrize("window", ["before the claim is looked at", "after it"])
def test_a_claim_that_races_pruning_goes_on_from_the_checkpoint_that_is_left(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: str
):
    claim_attempt(run)
    save(run, tmp_path, 6, 1)
    create, pruned = run.store.create, Checkpoints(Run.open(run.url))
    spans = chain(run)

    def prune() -> None:
        """Prune like the trainer before, which does not know yet that it is superseded."""
        monkeypatch.undo()
        save(run, tmp_path, 8, 1)
        monkeypatch.setattr("storage.runs.attempts.chain", lambda run: spans)
        assert pruned.prune(1) == [Version(6, 1)]
        monkeypatch.undo()

    def claim_meanwhile(key: str, data: bytes) -> None:
        create(key, data)
        if key == layout.attempt(2):
            prune()

    if window == "before the claim is looked at":
        monkeypatch.setattr(run.store, "create", claim_meanwhile)
        attempt = claim_attempt(run)
    else:
        assert claim_attempt(run).continues == Version(6, 1)
        prune()
        with pytest.raises(Missing, match="000006-a0001"):
            Checkpoints(run).load(6, 1)
        attempt = claim_attempt(run)
    assert (attempt.number, attempt.continues) == (3, Version(8, 1))
    assert chain(run) == [Span(1, 0, 8), Span(3, 9, None)]


@local
def test_an_attempt_that_must_begin_anew_says_so(run: Run, caplog: pytest.LogCaptureFixture):
    claim_attempt(run)
    assert caplog.text == ""
    claim_attempt(run)
    assert "attempt 2 starts from the beginning: no checkpoint exists" in caplog.text


def test_a_run_on_a_store_that_ignores_conditions_is_not_claimed(
    rclone: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    made = Run.create(str(tmp_path), "moved", config={}, sampler_sql="", code_version="test")
    copy = replace(made, store=open_store(s3_root(rclone, monkeypatch)))
    with pytest.raises(UnsafeStore, match="conditional writes"):
        claim_attempt(copy)
    assert newest_attempt(copy) == 0


@local
@pytest.mark.parametrize("continues", ['"2"', "[1]", "3", '{"sync": 3}', '{"sync": "x", "attempt": 1}'])
def test_an_attempt_that_does_not_say_what_it_continues_is_damaged(run: Run, continues: str):
    run.store.create(layout.attempt(1), f'{{"attempt": 1, "continues": {continues}, "created_at": ""}}'.encode())
    with pytest.raises(Damaged, match=r"attempts/0001\.json"):
        claim_attempt(run)


@pytest.mark.usefixtures("own_cache")
@long_on_s3
@pytest.mark.parametrize("how", DAMAGES)
def test_an_attempt_continues_the_newest_checkpoint_that_is_intact(run: Run, tmp_path: Path, how: str):
    claim_attempt(run)
    for sync in (2, 4, 6):
        save(run, tmp_path, sync, 1)
        run.store.create(layout.sync(sync), b'{"step": %d}' % (2 * sync))
    damage(run, Version(6, 1), how)
    passed_over: dict[Version, str] = {}
    attempt = claim_attempt(run, pass_over=lambda it, error: passed_over.update({it: str(error)}))
    assert attempt.continues == Version(4, 1)
    assert read_attempt(run, 2).continues == Version(4, 1)
    assert chain(run) == [Span(1, 0, 4), Span(2, 5, None)]
    name, _, said = DAMAGES[how]
    assert list(passed_over) == [Version(6, 1)]
    assert f"000006-a0001/{name}" in passed_over[Version(6, 1)] and said in passed_over[Version(6, 1)]
    assert Version(6, 1) in Checkpoints(run).complete()


@local
def test_a_checkpoint_that_the_caller_refuses_is_passed_over(run: Run, tmp_path: Path):
    claim_attempt(run)
    for sync in (2, 4):
        save(run, tmp_path, sync, 1)

    def refuse(checkpoint: Version, folder: Path) -> None:
        assert (folder / OPTIMIZER).exists()
        if checkpoint.number == 4:
            raise Damaged("it cannot be read")

    assert claim_attempt(run, check=refuse).continues == Version(2, 1)


@local
def test_where_all_that_an_attempt_led_to_is_damaged_the_chain_without_it_is_gone_on_from(run: Run, tmp_path: Path):
    """Attempt 2 continued checkpoint 2, because checkpoint 4 was damaged. Then checkpoint 4 has been restored."""
    claim_attempt(run)
    for sync in (2, 4):
        save(run, tmp_path, sync, 1)
    key = layout.checkpoint(Version(4, 1)) + OPTIMIZER
    before = run.store.read(key)
    damage(run, Version(4, 1))
    assert claim_attempt(run).continues == Version(2, 1)
    put(run.store, key, before)
    damage(run, Version(2, 1))
    assert claim_attempt(run).continues == Version(4, 1)


@pytest.mark.usefixtures("own_cache")
def test_where_no_checkpoint_is_intact_nothing_is_claimed_until_a_file_is_restored(run: Run, tmp_path: Path):
    claim_attempt(run)
    for sync in (2, 4):
        save(run, tmp_path, sync, 1)
    run.store.create(layout.sync(4), b'{"step": 8}')
    key = layout.checkpoint(Version(4, 1)) + OPTIMIZER
    before = run.store.read(key)
    for sync in (2, 4):
        damage(run, Version(sync, 1))
    with pytest.raises(Damaged) as raised:
        claim_attempt(run)
    for said in (
        "no checkpoint is intact", f"{layout.checkpoint(Version(2, 1))}{OPTIMIZER} does not have the content", key,
        "restore the file that is named and resume", "`tba fork first --step 8`", "start a new run",
    ):  # fmt: skip
        assert said in str(raised.value)
    assert newest_attempt(run) == 1
    put(run.store, key, before)
    assert claim_attempt(run).continues == Version(4, 1)


@local
def test_an_older_checkpoint_whose_steps_would_draw_what_was_given_up_is_not_continued(run: Run, tmp_path: Path):
    claim_attempt(run)
    for sync in (2, 4, 6):
        save(run, tmp_path, sync, 1)
        run.store.create(layout.sync(sync), b'{"step": %d}' % (2 * sync))
    rule = Eligibility(capacity=4, evict="oldest", copies="newest", max_age=None)
    payloads = GivenUpPayloads(columns=("response_tokens",), first_sync=0, last_sync=4, step=8, eligibility=rule)
    give_up(run, why="a test", payloads=payloads)
    damage(run, Version(6, 1))
    assert claim_attempt(run).continues == Version(4, 1)
    save(run, tmp_path, 6, 2)
    for name in (Version(6, 2), Version(4, 1)):
        damage(run, name)
    with pytest.raises(Damaged, match=r"no older checkpoint can be used, because retention/000001.json .* given up"):
        claim_attempt(run)
    assert newest_attempt(run) == 2


@local
def test_a_store_that_does_not_answer_is_no_damage(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    claim_attempt(run)
    for sync in (2, 4):
        save(run, tmp_path, sync, 1)

    def fail(*_: object, **__: object) -> Path:
        raise StorageError("no answer")

    monkeypatch.setattr("storage.objects.manifest_folders.local_copy", fail)
    with pytest.raises(StorageError, match="no answer") as raised:
        claim_attempt(run)
    assert not isinstance(raised.value, Damaged)
    assert newest_attempt(run) == 1


@local
def test_a_checkpoint_that_is_pruned_while_it_is_read_is_not_called_damaged(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    claim_attempt(run)
    save(run, tmp_path, 2, 1)
    local_copy = manifest_folders.local_copy

    def prune(*_: object, **__: object) -> Path:
        """Prune like the trainer before, which has a newer checkpoint."""
        monkeypatch.setattr("storage.objects.manifest_folders.local_copy", local_copy)
        save(run, tmp_path, 4, 1)
        manifest_folders.remove(run.store, layout.checkpoint(Version(2, 1)))
        return manifest_folders.local_copy(run.store, layout.checkpoint(Version(2, 1)))

    monkeypatch.setattr("storage.objects.manifest_folders.local_copy", prune)
    attempt = claim_attempt(run, pass_over=lambda it, error: pytest.fail(f"{it} {error}"))
    assert attempt.continues == Version(4, 1)
