"""Sync records of a replay buffer: when a record is ready, whose record counts, and which damage is refused."""

import json
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from storage import layout
from storage.log.schema import encode, to_table
from storage.log.sync_records import read_chain
from storage.runs.run import Run
from storage.weights.attempt_claim import claim_attempt
from tba.errors import Damaged, Missing, Superseded
from tba.types import Draw, Version
from tests.support.builders import make_shard, make_trajectory
from tests.support.faults.rewriting import with_digest
from tests.support.storage.indexes import make_eligibility
from tests.support.storage.small_buffers import RESPONSES, SLOTS, append, arrivals, make_buffer, train
from tests.support.storage.stored_objects import overwrite

on_disk = pytest.mark.parametrize("root", ["local"], indirect=True)


# --- records are facts ------------------------------------------------------------------------------------------------


@on_disk
def test_a_stored_record_is_adopted_even_if_more_has_arrived_since(run: Run):
    append(run, make_shard({"a": [0.0, 1.0]}))
    make_buffer(run).sync(0, step=0)
    append(run, make_shard({"a": [2.0]}, round=1))
    late = make_buffer(run, attempt=2)
    assert late.waiting() == 3
    assert late.sync(0, step=0) == 2
    assert late.waiting() == 1
    assert late.sync(1, step=2) == 1
    assert [record.attempt for record in read_chain(run)] == [1, 2]


@on_disk
def test_an_attempt_that_was_superseded_writes_no_record(run: Run):
    claim_attempt(run)
    buffer = make_buffer(run, attempt=1)
    buffer.sync(0, step=0)
    claim_attempt(run)
    with pytest.raises(Superseded, match="attempt 2 of the trainer has taken over from attempt 1"):
        buffer.sync(1, step=2)
    assert len(read_chain(run)) == 1


@on_disk
def test_losing_the_race_for_a_record_is_adoption_for_the_newest_attempt(run: Run, monkeypatch: pytest.MonkeyPatch):
    claim_attempt(run)
    claim_attempt(run)
    append(run, make_shard({"a": [0.0, 1.0]}))
    old, new = make_buffer(run, attempt=1), make_buffer(run, attempt=2)
    monkeypatch.setattr(old.records, "check_attempt", lambda: None)  # its check came just before attempt 2 was claimed
    look = new.arrivals.look

    def look_too_long() -> None:
        look()
        old.sync(0, step=0)
        append(run, make_shard({"a": [2.0]}, round=1))

    monkeypatch.setattr(new.arrivals, "look", look_too_long)
    assert new.sync(0, step=0) == 2
    monkeypatch.undo()
    assert [record.attempt for record in read_chain(run)] == [1]
    assert new.sync(1, step=2) == 1


@on_disk
def test_losing_the_race_for_a_record_is_the_end_for_a_superseded_attempt(run: Run, monkeypatch: pytest.MonkeyPatch):
    claim_attempt(run)
    append(run, make_shard({"a": [0.0, 1.0]}))
    old, create = make_buffer(run, attempt=1), run.store.create

    def create_too_late(key: str, data: bytes) -> None:
        monkeypatch.undo()
        claim_attempt(run)
        make_buffer(run, attempt=2).sync(0, step=0)
        create(key, data)

    monkeypatch.setattr(run.store, "create", create_too_late)
    with pytest.raises(Superseded):
        old.sync(0, step=0)
    assert [record.attempt for record in read_chain(run)] == [2]


def test_buffers_racing_for_a_record_hold_the_same_one(run: Run):
    for shard in arrivals(0):
        append(run, shard)
    buffers, barrier = [make_buffer(run) for _ in range(4)], Barrier(4)

    def race(place: int) -> list[list[Draw]]:
        draws, buffer = [], buffers[place]
        for sync in range(3):
            barrier.wait(60)
            if place == sync:  # the round of a searcher arrives while all buffers list
                append(run, arrivals(sync + 1)[0])
            buffer.sync(sync, step=2 * sync)
            draws.append(buffer.draw(2 * sync + 1))
        return draws

    with ThreadPoolExecutor(4) as pool:
        first, *others = pool.map(race, range(4))
    assert others == [first] * 3
    assert len(read_chain(run)) == 3


@on_disk
def test_a_shard_that_changed_since_it_was_admitted_is_damage(run: Run):
    key = append(run, make_shard({"a": [0.0, 1.0]}))
    buffer = make_buffer(run, memory_gb=1e-9)
    buffer.sync(0, step=0)
    append(run, make_shard({"b": [0.0]}, round=1))
    buffer.sync(1, step=2)
    other = make_shard({"a": [5.0, 6.0]})
    overwrite(run, key, encode(to_table(other, run=run.name, searcher=0, seq=0)))
    with pytest.raises(Damaged, match=r"searcher=000/seq=00000000\.parquet"):
        make_buffer(run).sync(0, step=0)
    with pytest.raises(Damaged, match=r"searcher=000/seq=00000000\.parquet"):
        [buffer.fetch(buffer.draw(step)) for step in (3, 4)]
    run.store.delete(key)
    with pytest.raises(Missing, match=r"searcher=000/seq=00000000\.parquet"):
        make_buffer(run).sync(0, step=0)


@on_disk
def test_a_record_that_breaks_the_chain_is_damage(run: Run):
    train(run, make_buffer(run), range(3))
    record = json.loads(run.store.read(layout.sync(1)))
    overwrite(run, layout.sync(1), with_digest({**record, "created_at": "2030-01-01"}))
    buffer = make_buffer(run)
    for sync in range(2):
        buffer.sync(sync, step=2 * sync)
    with pytest.raises(Damaged, match=r"syncs/000002\.json does not continue record 1"):
        buffer.sync(2, step=4)


@on_disk
def test_a_record_of_another_arithmetic_is_named(run: Run):
    train(run, make_buffer(run), range(2))
    buffer = make_buffer(run)
    buffer.sync(0, step=0)
    with pytest.raises(Damaged, match=r"syncs/000001\.json says that it follows step 2, .* follows step 4"):
        buffer.sync(1, step=4)


@on_disk
def test_records_are_applied_one_after_the_other(run: Run):
    buffer = make_buffer(run)
    with pytest.raises(ValueError, match="expected record 0, got 1"):
        buffer.sync(1, step=2)
    buffer.sync(0, step=0)
    with pytest.raises(ValueError, match="expected record 1, got 0"):
        buffer.sync(0, step=0)


@on_disk
def test_no_draw_sees_what_no_record_admits(run: Run):
    buffer = make_buffer(run, prompts_per_step=20)
    append(run, [make_trajectory("a", tokens=(n,), slot=n) for n in range(3)])
    buffer.sync(0, step=0)
    append(run, [make_trajectory("b", tokens=(n,), slot=n, round=1) for n in range(3)])
    buffer.waiting()
    assert {draw.prompt_id for draw in buffer.draw(1)} == {"a"}
    buffer.sync(1, step=2)
    assert {draw.prompt_id for draw in buffer.draw(3)} == {"a", "b"}


# --- searchers in step ------------------------------------------------------------------------------------------------


@on_disk
def test_in_step_a_record_admits_its_round_of_every_searcher_and_no_later_one(run: Run):
    """One round arrives early, and one was generated by the version of the same sync that admits it."""
    claim_attempt(run)
    buffer = make_buffer(run, searchers_in_step=2)

    def arrive(searcher: int, round: int, *, version: int = 0) -> None:
        versions = {"version_start": Version(version, 1), "version_end": Version(version, 1)}
        append(run, make_shard({"p": [0.0, 1.0]}, searcher=searcher, round=round, **versions))

    assert not buffer.ready(0, step=0, until=2)
    arrive(0, 0)
    assert not buffer.ready(0, step=0, until=2)
    arrive(1, 0)
    arrive(0, 1)
    assert buffer.ready(0, step=0, until=2)
    assert buffer.sync(0, step=0) == 4
    assert not buffer.ready(1, step=2, until=4)
    arrive(1, 1, version=1)
    assert buffer.ready(1, step=2, until=4)
    assert buffer.sync(1, step=2) == 4
    chain = [[(shard.searcher, shard.seq) for shard in record.shards] for record in read_chain(run)]
    assert chain == [[(0, 0), (1, 0)], [(0, 1), (1, 1)]]
    assert {draw.age for draw in buffer.draw(3)} <= {0, 2}
    later = make_buffer(run, searchers_in_step=2)
    assert later.ready(1, step=2, until=4)  # its record exists
    later.replay(1)
    assert later.draw(3) == buffer.draw(3)


@on_disk
def test_the_look_that_finds_a_record_ready_is_the_only_one(run: Run, monkeypatch: pytest.MonkeyPatch):
    """Each look lists the folders of all searchers."""
    claim_attempt(run)
    buffer, folders, looks = make_buffer(run, searchers_in_step=1), run.store.folders, list[str]()
    monkeypatch.setattr(run.store, "folders", lambda prefix: looks.append(prefix) or folders(prefix))
    for sync in range(2):
        append(run, make_shard({"p": [0.0, 1.0]}, round=sync))
        assert buffer.ready(sync, step=2 * sync, until=2 * sync + 2)
        assert buffer.sync(sync, step=2 * sync) == 2
    assert len(looks) == 2


@on_disk
def test_in_step_a_shard_that_was_refused_before_its_turn_is_not_waited_for(run: Run):
    claim_attempt(run)
    buffer = make_buffer(run, searchers_in_step=1)
    append(run, make_shard({"p": [0.0, 1.0]}))
    run.store.create(layout.shard(0, 1), b"half of it")
    assert buffer.ready(0, step=0, until=2)
    buffer.sync(0, step=0)
    assert buffer.ready(1, step=2, until=4)
    assert buffer.sync(1, step=2) == 0
    assert not buffer.ready(2, step=4, until=6)


@on_disk
def test_where_ages_are_bounded_a_record_waits_for_a_batch_that_is_young_until_the_next(run: Run):
    buffer = make_buffer(run, eligibility=make_eligibility(max_age=3))
    batch = SLOTS * RESPONSES
    append(run, make_shard({"p0": [0.0] * batch}))
    assert not buffer.ready(0, step=0, until=5), "they would be 4 steps old"
    assert buffer.ready(0, step=0, until=2)
    buffer.sync(0, step=0)
    buffer.draw(2)
    assert buffer.ready(1, step=2, until=4), "what was admitted counts"
    buffer.sync(1, step=2)
    assert not buffer.ready(2, step=4, until=6)
    append(run, make_shard({"p1": [0.0] * (batch - 1)}, round=1, version_start=Version(1, 1)))
    append(run, make_shard({"p2": [0.0] * batch}, round=2))
    assert not buffer.ready(2, step=4, until=6), "one lacks, others are too old"
    append(run, make_shard({"p3": [0.0]}, round=3, version_start=Version(1, 1)))
    assert buffer.ready(2, step=4, until=6)
    buffer.sync(2, step=4)
    assert make_buffer(run, eligibility=make_eligibility(max_age=3)).ready(2, step=4, until=999)  # its record exists
    assert {draw.prompt_id for step in (5, 6) for draw in buffer.draw(step)} <= {"p1", "p3"}


def test_where_nobody_waits_every_record_is_ready(run: Run):
    assert make_buffer(run).ready(0, step=0, until=2)
