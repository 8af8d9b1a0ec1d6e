"""How a trainer ends: because storage fails, because another one has taken over, or because it is asked to stop."""

import math
from typing import Any

import pytest
import torch

from tba.config import Config
from tba.errors import RunFailed, Stopped, StorageError, Superseded
from tba.train.stop_time import CHECKPOINT, RECENT_STEPS, StoreTimes, checkpoint_to_version, steps_to_stop
from tests.support.tba.trainers import LeaseAt, make, settings

IN_STEP = {"sync__keep_versions": 3, "search__prompts_per_round": 6}  # what `sync.lag` needs

# --- Trouble ---


def test_a_ledger_that_cannot_be_written_ends_the_run_before_any_later_sync(tmp_path):
    trainer, store = make(
        tmp_path, settings(), slow={"ledger": 0.1}, broken={"ledger 2": StorageError("ledger 2 is lost")}
    )
    with pytest.raises(StorageError, match="ledger 2 is lost"):
        trainer.run()
    stored = [entry for entry in store.journal if entry.startswith(("ledger", "version", "checkpoint"))]
    assert stored == ["version 0", "ledger 1", "version 1"]


@pytest.mark.parametrize("entry", ["ledger 1", "version 1", "checkpoint 1"])
def test_trouble_beside_the_steps_is_noticed_at_the_next_step_not_at_the_next_sync(tmp_path, entry):
    config = settings(training__steps=90, sync__every=30, sync__checkpoint_every=1)
    trainer, store = make(tmp_path, config, broken={entry: StorageError("gone")})
    trainer.syncs.versions.publish = lambda version, **_: store.take("version", version.number)
    with pytest.raises(StorageError, match="gone"):
        trainer.run()
    assert 30 <= len(store.written) < 55  # the next sync would notice only at 59


def test_a_checkpoint_that_fails_is_not_followed_by_another(tmp_path):
    trainer, store = make(tmp_path, settings(sync__checkpoint_every=1), broken={"checkpoint 2": StorageError("full")})
    with pytest.raises(StorageError, match="full"):
        trainer.run()
    assert [entry for entry in store.journal if entry.startswith("checkpoint")] == ["checkpoint 1"]


def test_a_record_that_cannot_be_written_is_crossed_by_no_step(tmp_path):
    trainer, store = make(tmp_path, settings())
    trainer.ahead.buffer.broken = {2: StorageError("record 2 is lost")}  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(StorageError, match="record 2 is lost"):
        trainer.run()
    assert len(store.written) == 4 and "ledger 2" not in store.journal


def test_syncs_that_were_closed_are_stored_though_a_later_step_fails(tmp_path):
    trainer, store = make(tmp_path, settings(limits__skipped_steps=0), slow={"ledger": 0.1}, rewards={5: math.nan})
    with pytest.raises(RunFailed, match="step 5"):
        trainer.run()
    assert {"ledger 1", "ledger 2"} <= set(store.journal) and "ledger 3" not in store.journal


def test_a_superseded_trainer_writes_and_removes_nothing_more(tmp_path):
    lease = LeaseAt(Superseded("another has taken over"), 5)
    trainer, store = make(tmp_path, settings(), lease=lease, gates={"ledger 1": lease.said})
    with pytest.raises(Superseded):
        trainer.run()
    stored = [entry for entry in store.journal if not entry.startswith("record")]
    assert stored == ["version 0", "ledger 1"]  # this ledger was being written


# --- Stops ---


def test_a_trainer_that_is_asked_to_stop_ends_at_the_next_sync_with_version_and_checkpoint(tmp_path):
    trainer, store = make(tmp_path, settings(), lease=LeaseAt(Stopped("enough"), 6))
    with pytest.raises(Stopped):
        trainer.run()
    assert len(store.records) == 8
    assert {"ledger 4", "version 4", "checkpoint 4"} <= set(store.journal)


@pytest.mark.parametrize(("told", "steps", "sync"), [(4, 4, 2), (5, 6, 3), (6, 6, 3), (7, 8, 4)])
def test_a_trainer_that_goes_in_step_with_searchers_ends_at_a_sync_that_it_has_closed(tmp_path, told, steps, sync):
    """The searchers stop as well, so the round that the next sync record needs may never come."""
    trainer, store = make(tmp_path, settings(sync__lag=1, **IN_STEP), lease=LeaseAt(Stopped("enough"), told))
    trainer.ahead.buffer.missing = {sync + 1}  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(Stopped, match="enough"):
        trainer.run()
    assert len(store.records) == steps
    assert {f"ledger {sync}", f"version {sync}", f"checkpoint {sync}"} <= set(store.journal)
    state = store.states[sync]
    assert (state.step, state.sync) == (steps, sync)
    assert state.queues == {"after": 1}, "as after the record of this sync"
    assert store.kept[sync].keys() == store.weights[sync].keys()
    assert all(torch.equal(it, store.weights[sync][name]) for name, it in store.kept[sync].items())
    assert store.journal.count(f"checkpoint {sync}") == 1


def test_without_the_round_of_the_last_sync_a_trainer_in_step_stores_no_checkpoint_of_it(tmp_path):
    """Its ledger must not be stored before its record, which waits for the round."""
    trainer, store = make(tmp_path, settings(sync__lag=1, **IN_STEP), lease=LeaseAt(Stopped("enough"), 4))
    trainer.ahead.buffer.missing = {2}  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(Stopped, match="enough"):
        trainer.run()
    assert "ledger 1" in store.journal
    assert not {"ledger 2", "version 2", "checkpoint 2"} & set(store.journal)


def test_a_trainer_that_is_asked_to_stop_before_its_first_step_stores_nothing_new(tmp_path):
    config = settings(sync__lag=1, **IN_STEP)
    trainer, store = make(tmp_path, config, lease=LeaseAt(Stopped("enough"), 0))
    trainer.ahead.buffer.missing = {1}  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(Stopped):
        trainer.run()
    assert not any(entry.startswith(("ledger", "checkpoint")) for entry in store.journal)


def test_a_trainer_in_step_with_searchers_tells_only_the_steps_up_to_a_sync_that_it_may_end_at():
    config = settings(training__steps=10, sync__lag=1, **IN_STEP)
    assert [steps_to_stop(config, step, is_stopping=False) for step in (0, 1, 2, 3, 9, 10)] == [2, 1, 2, 1, 1, 0]


@pytest.mark.parametrize(("step", "stopping", "left"), [
    (0, False, 2), (1, False, 3), (2, False, 2), (3, False, 3), (9, False, 1), (10, False, 0),
    (1, True, 1), (2, True, 2), (10, True, 0),
])  # fmt: skip
def test_a_stop_takes_the_steps_until_a_sync_that_is_not_the_next_one_if_it_is_heard_only_after_that(
    step: int, stopping: bool, left: int
):
    config = settings(training__steps=10, sync__every=2)
    assert steps_to_stop(config, step, is_stopping=stopping) == left


class Listening(LeaseAt):
    """Records the progress that the trainer tells."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.told: list[str] = []
        self.progress: list[dict[str, float]] = []

    def tell(self, status: str, **progress: float) -> None:
        super().tell(status, **progress)
        self.told.append(status)
        self.progress.append(progress)


def test_a_trainer_tells_how_long_it_would_take_to_stop_by_its_longest_step_and_what_its_syncs_store(tmp_path):
    lease = Listening(Stopped("enough"), 6)
    trainer, _ = make(tmp_path, settings(), lease=lease)
    with pytest.raises(Stopped):
        trainer.run()
    steps = [it for it in lease.progress if "seconds_step" in it]
    assert all(it["seconds_to_stop"] >= round(it["seconds_step"], 1) for it in steps[:-1])
    assert lease.told[-1] == "stopping: stores the sync after step 8"
    assert "seconds_to_stop" in lease.progress[-1]
    trainer.step_times.add(100.0)
    trainer.syncs.times.ledger.add(3.0)
    trainer.syncs.times.version.add(20.0)
    trainer.syncs.times.checkpoint.add(50.0)
    trainer.stopping = None
    assert trainer.seconds_to_stop(2) == pytest.approx(2 * 100 + 73, abs=0.1)
    for _ in range(RECENT_STEPS):
        trainer.step_times.add(1.0)
    assert trainer.seconds_to_stop(2) == pytest.approx(2 * 1 + 73, abs=0.1), "a long step is not long remembered"


def test_before_a_checkpoint_was_measured_it_counts_as_some_versions():
    times = StoreTimes()
    assert times.seconds == 0
    times.version.add(5.0)
    assert times.seconds == 5 + CHECKPOINT * 5
    times.checkpoint.add(7.0)
    assert times.seconds == 12


def test_a_version_of_half_the_precision_is_assumed_to_take_half_the_time_of_a_whole_one():
    assert checkpoint_to_version(Config()) == CHECKPOINT
    assert checkpoint_to_version(Config().replace({"model.publish_dtype": "bfloat16"})) == 2 * CHECKPOINT
