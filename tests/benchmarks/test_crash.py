"""Kills in training come after the attempt has stored a checkpoint, and chains of attempts are followed."""

import random
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.crash.kills import MOMENTS, RANDOM, TRAINING, Kill, kills_at_any_time, kills_in_training, shares
from benchmarks.crash.results import Chain, Findings
from benchmarks.crash.runs import follow_chain
from benchmarks.crash.victims import DeadlyStore, signal_of
from storage.objects.local_store import LocalStore
from storage.runs.run import Run

WHOLE = Path(__file__).parents[1] / "data" / "0.1.0" / "runs" / "whole"


class Killed(Exception): ...


@pytest.fixture
def deadly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DeadlyStore:
    """A store that dies after its second write of steps, once two checkpoints are stored."""

    def die(store: DeadlyStore) -> None:
        raise Killed

    monkeypatch.setattr(DeadlyStore, "die", die)
    kill = Kill("trainer", "steps", "after", nth=2, checkpoints=2)
    return DeadlyStore(LocalStore(tmp_path / "store"), kill, tmp_path / "notes", seed=0)


def test_the_kills_in_training_wait_for_a_checkpoint_and_hit_every_write_of_a_trainer_at_every_moment():
    kills = kills_in_training(200, random.Random(0))
    assert len(kills) == 200
    assert all(kill.checkpoints >= 1 for kill in kills)
    assert {(kill.point, kill.moment) for kill in kills if kill.point != RANDOM} == {
        (point, moment) for point in TRAINING for moment in MOMENTS
    }
    at_random = [kill for kill in kills if kill.point == RANDOM]
    assert len(at_random) == 100
    assert {kill.role for kill in at_random} == {"trainer", "reader"}
    assert not any(kill.checkpoints for kill in kills_at_any_time(120, random.Random(0)))


def test_the_kills_are_shared_equally_and_none_is_left_out():
    kills = kills_in_training(31, random.Random(0))
    split = shares(kills, 14)
    assert [len(share) for share in split] == [11, 10, 10]
    assert {id(kill) for share in split for kill in share} == {id(kill) for kill in kills}
    assert shares([], 14) == []


def test_a_kill_in_training_spares_all_writes_before_the_attempt_has_stored_its_checkpoints(deadly: DeadlyStore):
    for sync in range(1, 4):
        deadly.create(f"steps/{sync}", b"")
    deadly.create("checkpoints/000002-a0001/MANIFEST.json", b"")
    deadly.create("versions/000004-a0001/MANIFEST.json", b"")
    deadly.create("steps/4", b"")
    assert not signal_of(deadly.notes).exists()
    deadly.create("checkpoints/000004-a0001/MANIFEST.json", b"")
    assert signal_of(deadly.notes).exists()
    deadly.create("draws/5", b"")
    deadly.create("steps/5", b"")
    with pytest.raises(Killed):
        deadly.create("steps/6", b"")
    assert deadly.store.exists("steps/6")


def test_the_chain_of_a_run_names_the_attempts_whose_steps_count_and_how_many_steps_each_took():
    findings = Findings("local disk")
    chain = follow_chain(Run.open(str(WHOLE)), findings, killed_in_training=[1])
    assert (chain.attempts, chain.crossed, chain.steps) == (2, [1, 2], [4, 6])
    assert findings.wrong == []


def test_an_attempt_that_was_killed_in_training_must_be_in_the_chain():
    findings = Findings("local disk")
    follow_chain(Run.open(str(WHOLE)), findings, killed_in_training=[1, 3])
    assert findings.wrong == ["whole: attempts [3] had stored a checkpoint, and the chain leaves them out"]


def test_the_results_say_how_many_attempts_the_chains_of_runs_killed_in_training_cross():
    findings = Findings("local disk")
    for length, killed in ((4, [1]), (9, [1, 2]), (7, [1]), (2, list[int]())):
        of_run = Findings("run", kills=Counter({"in training: after steps": len(killed)}))
        crossed = list(range(1, length + 1))
        of_run.chains.append(
            Chain(run="run", attempts=length, killed_in_training=killed, crossed=crossed, steps=[2] * length)
        )
        findings.add(of_run)
    assert findings.crossed == {"chains": 3, "min": 4, "median": 7, "max": 9, "at_least_5": 2}
    assert findings.in_training == 4
    assert "the 3 chains of runs killed in training cross 4 to 9 attempts (median 7), 2 of them at least 5" in str(
        findings
    )
