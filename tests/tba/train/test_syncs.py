"""Syncs of a trainer: what is stored and in which order, what the steps wait for, and what a slow store costs."""

import math
import time
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from tba.errors import DeadlinePassed, RunFailed, Stopped, StorageError
from tba.models.policy import Policy, Snapshot
from tba.train.trainer import Trainer
from tba.types import Version
from tests.support.tba.trainers import EVERY, PROMPTS, STEPS, LeaseAt, Store, make, settings

# --- What is stored, and in which order ---


def test_every_sync_is_a_record_then_its_ledger_then_its_version_and_checkpoint(tmp_path):
    trainer, store = make(tmp_path, settings(), pause=0.02)
    trainer.run()
    journal = store.journal
    assert journal[0] == "version 0" and journal[1] == "record 0"
    for sync in range(1, 7):
        assert journal.index(f"record {sync}") < journal.index(f"ledger {sync}")
        for later in (f"version {sync}", f"checkpoint {sync}"):
            assert later not in journal or journal.index(f"ledger {sync}") < journal.index(later)
    assert [entry for entry in journal if entry.startswith("checkpoint")] == ["checkpoint 3", "checkpoint 6"]
    assert {0, 1, 3, 6} <= set(store.published())
    assert journal.count("prune checkpoints") == 2 and "prune versions" in journal
    assert {"version 6", "checkpoint 6"} < set(journal[: len(journal) - journal[::-1].index("prune versions")])


def test_versions_are_stored_as_told_and_checkpoints_in_full_precision(tmp_path):
    trainer, store = make(tmp_path, settings(model__publish_dtype="bfloat16"))
    trainer.run()
    for number in (0, 6):
        assert {weights.dtype for weights in store.weights[number].values()} == {torch.bfloat16}
    assert store.dtypes["checkpoint 3"] == store.dtypes["checkpoint 6"] == {torch.float32}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_version_says_which_share_of_its_weights_is_not_that_of_the_version_published_before(tmp_path, dtype):
    """This is so even if numbers of versions in between were skipped."""
    config = settings(model__publish_dtype=dtype, sync__checkpoint_every=2)
    trainer, store = make(tmp_path, config, slow={"version": 0.05})
    trainer.run()
    published = sorted(store.weights)
    assert {0, 2, 4, 6} <= set(published)
    assert store.changed.pop(0) is None
    for before, after in pairwise(published):
        old, new = (torch.cat([it.flatten() for it in store.weights[n].values()]) for n in (before, after))
        assert store.changed[after] == int((old != new).sum()) / len(new) > 0


@pytest.mark.parametrize(
    ("whole", "bases"),
    [
        ((), {0: None, 1: 0, 2: 0, 3: None, 4: 3, 5: 3, 6: None}),
        ((1, 5), {0: None, 1: 0, 2: 1, 3: None, 4: 3, 5: 3, 6: None}),
    ],
)
def test_versions_may_be_stored_as_differences_from_the_last_that_is_stored_whole(tmp_path, whole, bases):
    config = settings(sync__whole_every=3, sync__checkpoint_every=1)
    trainer, store = make(tmp_path, config, whole=whole)
    trainer.run()
    assert store.bases == bases
    assert len(list(tmp_path.iterdir())) == 1, "the last, which is its own base"


def test_a_resumed_trainers_first_version_is_compared_with_none(tmp_path):
    half, store = make(tmp_path, settings(), lease=LeaseAt(Stopped("enough"), 5))
    with pytest.raises(Stopped):
        half.run()
    rest, after = make(tmp_path, settings(), policy=half.learner.policy)
    rest.resume(store.states[3])
    rest.run()
    first, *later = sorted(after.changed)
    assert first == 3 and after.changed[first] is None
    assert later and all(after.changed[number] for number in later)


def test_ledger_and_checkpoint_are_of_the_moment_of_their_sync_though_training_went_on(tmp_path):
    """A slow store gets weights, moments and queues as they were at the sync."""
    trainer, store = make(tmp_path, settings(), slow={"ledger": 0.03})
    trainer.run()
    short, expected = make(tmp_path, settings(training__steps=6))
    short.run()
    assert store.digests[3] == expected.digests[3]
    late, wanted = store.states[3], expected.states[3]
    assert (late.step, late.sync, late.queues) == (6, 3, {"after": 1})
    assert late.optimizer.keys() == wanted.optimizer.keys()
    assert all(torch.equal(late.optimizer[name], wanted.optimizer[name]) for name in late.optimizer)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="a reference that stays"),
        pytest.param({"objective__reference_reset": 4}, id="one that was reset"),
        pytest.param({"objective__reference_reset": 3, "objective__reset_optimizer": True}, id="the optimizer too"),
        pytest.param({"objective__reference_decay": 0.9}, id="one that follows"),
        pytest.param({"objective__name": "ppo"}, id="a value model"),
        pytest.param({"objective__log_z": "learned", "objective__log_z_learning_rate": 0.1}, id="a learned log Z"),
    ],
)
def test_a_resumed_trainer_takes_the_steps_of_an_unbroken_one(tmp_path, changes):
    config = settings(**changes)
    whole, expected = make(tmp_path, config)
    whole.run()
    half, store = make(tmp_path, config, lease=LeaseAt(Stopped("enough"), 5))
    with pytest.raises(Stopped):
        half.run()
    rest, after = make(tmp_path, config, policy=half.learner.policy)
    rest.resume(store.states[3])
    rest.run()
    assert [record.step for record in after.records] == list(range(7, STEPS + 1))
    assert after.digests[6] == expected.digests[6]
    kept, wanted = (store.states[6].auxiliary or {} for store in (after, expected))
    assert bool(wanted) == (whole.learner.auxiliary is not None)
    assert kept.keys() == wanted.keys() and all(torch.equal(kept[name], it) for name, it in wanted.items())
    assert after.journal[:5] == [*(f"record {sync}" for sync in range(4)), "version 3"]


# --- Waiting for responses ---


def test_the_initial_fill_is_waited_for_until_its_deadline(tmp_path):
    trainer, store = make(tmp_path, settings(limits__data_deadline=0.01))
    trainer.ahead.buffer.arrived = 5  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(DeadlinePassed, match="5 of 6 trajectories"):
        trainer.run()
    assert store.journal == ["version 0"]


def test_synchronous_training_publishes_a_version_before_the_record_that_waits_for_it(tmp_path):
    config = settings(sync__lag=0, sync__every=1, training__steps=4, search__prompts_per_round=PROMPTS)
    trainer, store = make(tmp_path, config)
    trainer.ahead.buffer.missing = {1, 2, 3, 4}  # pyright: ignore[reportAttributeAccessIssue]

    def publish(version: Version, **_: Any) -> None:
        store.journal.append(f"version {version.number}")
        trainer.ahead.buffer.missing.discard(version.number)  # pyright: ignore[reportAttributeAccessIssue]

    trainer.syncs.versions.publish = publish
    trainer.run()
    for sync in range(1, 5):
        version, record, ledger = (store.journal.index(f"{it} {sync}") for it in ("version", "record", "ledger"))
        assert version < record < ledger


def test_a_step_that_fails_while_a_round_is_awaited_ends_the_trainer(tmp_path):
    config = settings(sync__lag=0, sync__every=1, search__prompts_per_round=PROMPTS, limits__skipped_steps=0)
    trainer, store = make(tmp_path, config, rewards={1: math.nan})
    trainer.ahead.buffer.missing = {1}  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(RunFailed, match="step 1: loss nan"):
        trainer.run()  # its deadline for the round is longer than that of a test
    assert "record 1" not in store.journal


def test_a_version_that_cannot_be_stored_is_noticed_by_who_waits_for_its_round(tmp_path):
    config = settings(sync__lag=0, sync__every=1, search__prompts_per_round=PROMPTS)
    trainer, _ = make(tmp_path, config)
    trainer.ahead.buffer.missing = {1}  # pyright: ignore[reportAttributeAccessIssue]

    def publish(version: Version, **_: Any) -> None:
        if version.number:
            raise StorageError(f"version {version.number} is lost")

    trainer.syncs.versions.publish = publish
    with pytest.raises(StorageError, match="version 1 is lost"):
        trainer.run()


def test_a_round_that_does_not_arrive_is_waited_for_until_its_deadline(tmp_path):
    config = settings(sync__lag=1, limits__data_deadline=0.3, search__prompts_per_round=PROMPTS * EVERY)
    trainer, store = make(tmp_path, config)
    trainer.ahead.buffer.missing = {2}  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(DeadlinePassed, match=r"round 2 of some searcher has not arrived after 0\.3 s"):
        trainer.run()
    assert "ledger 1" in store.journal and "ledger 2" not in store.journal


def test_where_ages_are_bounded_each_record_but_the_last_waits_for_younger_responses_and_every_version_is_there(
    tmp_path,
):
    """Each record waits for responses of the version before it. Publishing that version takes longer than the steps."""
    config = settings(sampling__max_age=2 * EVERY - 1, sync__checkpoint_every=100, limits__data_deadline=9)
    trainer, store = make(tmp_path, config, slow={"version": 0.2})
    buffer, publish = trainer.ahead.buffer, trainer.syncs.versions.publish
    buffer.missing = set(range(2, config.last_sync + 1))  # pyright: ignore[reportAttributeAccessIssue]

    def published(version: Version, **known: Any) -> None:
        publish(version, **known)
        buffer.missing -= {version.number + 1} - {config.last_sync}  # pyright: ignore[reportAttributeAccessIssue]

    trainer.syncs.versions.publish = published
    trainer.run()
    for sync in range(2, config.last_sync):
        assert store.journal.index(f"version {sync - 1}") < store.journal.index(f"record {sync}")


def test_younger_responses_that_do_not_arrive_are_waited_for_until_the_deadline(tmp_path):
    config = settings(sampling__max_age=2 * EVERY, limits__data_deadline=0.3)
    trainer, store = make(tmp_path, config)
    trainer.ahead.buffer.missing = {2}  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(DeadlinePassed, match=rf"fewer than 6 responses .* {2 * EVERY} steps old \(sampling.max_age\)"):
        trainer.run()
    assert "ledger 1" in store.journal and "ledger 2" not in store.journal


# --- A slow store ---


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return a function that counts the copies of the weights."""
    taken: list[weakref.ref[Snapshot]] = []
    snapshot = Policy.snapshot

    def counted(policy: Policy) -> Snapshot:
        taken.append(weakref.ref(copy := snapshot(policy)))
        return copy

    monkeypatch.setattr(Policy, "snapshot", counted)
    return lambda: sum(copy() is not None for copy in taken)


def run_counting(trainer: Trainer, store: Store, alive: Callable[[], int], *, pause: float) -> int:
    """Run the trainer, and return the greatest number of copies of the weights at the end of a step."""
    counts: list[int] = []

    def write(metrics: dict[str, float], *, step: int) -> None:
        time.sleep(pause)
        counts.append(alive())
        store.written.append(metrics)

    trainer.metrics.write = write
    trainer.syncs.versions.publish = lambda version, **_: store.take("version", version.number)
    trainer.run()
    return max(counts)


def test_where_publishing_is_slow_numbers_are_skipped_and_no_step_waits(tmp_path, alive):
    config = settings(training__steps=60, sync__checkpoint_every=15)
    trainer, store = make(tmp_path, config, slow={"version": 0.5})
    told: list[float] = []

    def tell(status: str, **progress: float) -> None:
        told.append(progress.get("version", -1))
        assert told[-1] in [-1, *store.published()], "the lease tells of a version that nobody can load"

    trainer.lease.tell = tell
    assert run_counting(trainer, store, alive, pause=0.02) <= 4
    assert {0, 1, 15, 30} < set(store.published()) and len(store.published()) < 20
    assert [entry for entry in store.journal if entry.startswith("ledger")] == [f"ledger {n}" for n in range(1, 31)]
    assert sum(seen.get("seconds_backlog", 0.0) for seen in store.written) < 1.0
    assert len(set(told)) > 2 and told == sorted(told)


def test_where_the_ledger_is_slow_versions_go_on_memory_is_bounded_and_the_wait_is_measured(tmp_path, alive):
    trainer, store = make(tmp_path, settings(training__steps=24, sync__checkpoint_every=100))
    # The ledger is slower than the steps on any machine.
    store.slow["ledger"] = lambda: 0.3 + 3 * EVERY * max(seen["seconds_forward_backward"] for seen in store.written)
    assert run_counting(trainer, store, alive, pause=0.0) <= 4
    assert len(store.published()) >= 5
    waited = sum(seen.get("seconds_backlog", 0.0) for seen in store.written)
    assert 0.3 < waited < sum(seen["seconds_step"] for seen in store.written)


def test_the_step_that_closes_a_sync_counts_what_the_copy_costs(tmp_path):
    trainer, store = make(tmp_path, settings())
    trainer.run()
    for record in store.records:
        closes = record.step % EVERY == 0
        assert ("seconds_snapshot" in record.metrics, "seconds_backlog" in record.metrics) == (closes, closes)
        parts = ("wait", "forward_backward", "snapshot", "backlog")
        spent = sum(record.metrics.get(f"seconds_{part}", 0.0) for part in parts)
        assert 0 < spent <= record.metrics["seconds_step"] < spent + 0.5
