"""Attempts: which checkpoint each continues, and whose ledger counts."""

import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage import layout
from storage.attempts import Span, chain, claim_attempt, newest_attempt, read_attempt
from storage.checkpoints import Checkpoints
from storage.run import Run
from storage.store import open_store
from tba.errors import Damaged, Missing, UnsafeStore
from tba.types import Version
from tests.conftest import s3_root
from tests.servers import Server
from tests.storage.test_checkpoints import save

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
    """Each life of the trainer is the distances between the checkpoints it makes before it dies."""
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
        """The trainer before, which does not know yet that it is superseded."""
        monkeypatch.undo()
        save(run, tmp_path, 8, 1)
        monkeypatch.setattr("storage.attempts.chain", lambda run: spans)
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
