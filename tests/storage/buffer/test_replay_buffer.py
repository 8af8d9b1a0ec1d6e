"""A replay buffer draws and fetches what searchers have appended. Draws follow from seed, sampler and records."""

import json
from dataclasses import replace
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.harness.fetched import fetched_of
from storage import layout
from storage.log.sync_records import read_chain
from storage.runs.run import Run
from tba.errors import ConfigError, Missing
from tests.support.builders import as_stored, make_shard, rows_of
from tests.support.storage.indexes import oracle_rows
from tests.support.storage.oracle import Oracle
from tests.support.storage.small_buffers import CAPACITY, RESPONSES, SLOTS, append, arrivals, make_buffer, train

on_disk = pytest.mark.parametrize("root", ["local"], indirect=True)


# --- what is stored is what is learned from ---------------------------------------------------------------------------


def test_what_searchers_appended_is_what_is_drawn_and_fetched(run: Run):
    buffer = make_buffer(run)
    assert (buffer.recorded(0), buffer.waiting()) == (False, 0)
    shards = [*arrivals(0), *arrivals(1)]
    for shard in shards:
        append(run, shard)
    assert buffer.waiting() == 36
    assert buffer.sync(0, step=0) == 36
    assert (buffer.recorded(0), buffer.waiting()) == (True, 0)

    stored = {name: trajectory for shard in shards for name, trajectory in as_stored(shard).items()}
    draws = buffer.draw(1)
    drawn = [stored[draw.trajectory_id] for draw in draws]
    assert [draw.prompt_id for draw in draws] == [trajectory.prompt_id for trajectory in drawn]
    assert rows_of(buffer.fetch(draws)) == rows_of(fetched_of(drawn))


@on_disk
def test_a_record_says_what_it_admitted_and_continues_the_chain(run: Run):
    train(run, make_buffer(run), range(2))
    first, second = read_chain(run)
    assert [(shard.key, shard.rows) for shard in second.shards] == [(layout.shard(0, 1), 9), (layout.shard(1, 1), 9)]
    assert (first.sync, first.step, first.attempt, first.rows, first.refused) == (0, 0, 1, 18, [])
    assert (second.sync, second.step, second.previous_sha256) == (
        1,
        2,
        sha256(run.store.read(layout.sync(0))).hexdigest(),
    )
    for shard in first.shards:
        data = run.store.read(shard.key)
        assert (shard.bytes, shard.sha256) == (len(data), sha256(data).hexdigest())


@on_disk
def test_drawn_duplicates_are_the_same_trajectory(run: Run):
    append(run, make_shard({"a": [1.0]}))
    buffer = make_buffer(run)
    buffer.sync(0, step=0)
    first, second, *_ = rows_of(buffer.fetch(buffer.draw(1)))
    assert first == second


@on_disk
def test_a_shard_that_arrives_before_an_earlier_one_is_admitted_and_so_is_the_earlier_one(run: Run):
    buffer = make_buffer(run)
    for sync, round in enumerate((0, 2, 1, 3)):
        append(run, make_shard({"a": [0.0]}, round=round))
        assert buffer.sync(sync, step=2 * sync) == 1
    assert [[shard.seq for shard in record.shards] for record in read_chain(run)] == [[0], [2], [1], [3]]


@on_disk
def test_searchers_may_join_and_leave(run: Run):
    buffer = make_buffer(run)
    for sync, searcher in enumerate((4, 0, 1234)):
        append(run, make_shard({"a": [0.0]}, searcher=searcher))
        assert buffer.sync(sync, step=2 * sync) == 1
    assert buffer.sync(3, step=6) == 0


@on_disk
def test_shards_that_do_not_fit_in_memory_are_read_again(run: Run):
    ample, tight = make_buffer(run), make_buffer(run, memory_gb=1e-9)
    draws = train(run, ample, range(4))
    assert train(run, tight, range(4)) == draws
    assert [rows_of(tight.fetch(it)) for it in draws] == [rows_of(ample.fetch(it)) for it in draws]


@on_disk
def test_a_trajectory_that_no_record_admits_cannot_be_fetched(run: Run):
    append(run, make_shard({"a": [1.0, 2.0]}))
    buffer = make_buffer(run)
    buffer.sync(0, step=0)
    with pytest.raises(Missing, match="'0/7'"):
        buffer.fetch([replace(buffer.draw(1)[0], trajectory_id="0/7/0")])


# --- draws follow from seed, sampler and records ----------------------------------------------------------------------


@settings(max_examples=8, deadline=None)
@given(
    rounds=st.lists(st.lists(st.integers(0, 2), max_size=3), min_size=1, max_size=3),
    seed=st.integers(0, 99),
    impatient=st.booleans(),
)
def test_draws_are_those_of_the_oracle(
    tmp_path_factory: pytest.TempPathFactory, rounds: list[list[int]], seed: int, impatient: bool
):
    root = str(tmp_path_factory.mktemp("root"))
    run = Run.create(root, "any", config={}, sampler_sql="", code_version="test")
    buffer, oracle = (
        make_buffer(run, seed=seed),
        Oracle(seed=seed, slots=SLOTS, responses=RESPONSES, recent_share=0.5, inv_temp=1.0, capacity=CAPACITY),
    )
    for sync, searchers in enumerate(rounds):
        shards = [
            make_shard({f"p{(searcher + n) % 4}": [0.1 * n, float(sync)] for n in range(2)}, searcher=searcher,
                       round=10 * sync + place)
            for place, searcher in enumerate(searchers)
        ]  # fmt: skip
        for shard in shards:
            append(run, shard)
            if impatient:
                buffer.waiting()
        buffer.sync(sync, step=sync)
        in_order = sorted(shards, key=lambda shard: (shard[0].searcher, shard[0].round))
        oracle.admit(sync, [row for shard in in_order for row in oracle_rows(shard)])
        if oracle.entered:
            expected = [drawn[:5] for drawn in oracle.draw(sync + 1)]
            draws = buffer.draw(sync + 1)
            assert [(d.slot, d.position, d.trajectory_id, d.prompt_id, d.branch) for d in draws] == expected


@on_disk
def test_draws_do_not_depend_on_the_runs_name(root: str):
    runs = [Run.create(root, name, config={}, sampler_sql="", code_version="test") for name in ("one", "two")]
    one, two = [train(run, make_buffer(run), range(4)) for run in runs]
    assert one == two


@on_disk
def test_draws_do_not_depend_on_when_arrivals_were_looked_for(root: str):
    draws = []
    for often in (False, True):
        run = Run.create(root, f"looked-{often}", config={}, sampler_sql="", code_version="test")
        buffer = make_buffer(run)
        for shard in reversed(arrivals(0)):
            append(run, shard)
            if often:
                buffer.waiting()
        draws.append(train(run, buffer, range(1)) + [buffer.draw(step) for step in range(1, 4)])
    assert draws[0] == draws[1]


@on_disk
def test_a_buffer_rebuilt_from_the_records_draws_what_an_unbroken_one_would_have(run: Run):
    unbroken = make_buffer(run)
    draws = train(run, unbroken, range(2))
    queues = json.loads(json.dumps(unbroken.queues()))  # in the form that a checkpoint stores
    draws += train(run, unbroken, range(2, 6))

    resumed = make_buffer(run, attempt=2)
    for sync in range(2):
        resumed.sync(sync, step=2 * sync)
    resumed.restore(queues)
    assert resumed.queues() == queues
    assert train(run, resumed, range(2, 6)) == draws[2:]
    assert resumed.queues() == unbroken.queues()
    assert resumed.draw(11) == unbroken.draw(11)


@on_disk
def test_queues_can_be_recomputed_by_drawing_again(run: Run):
    first, again = make_buffer(run), make_buffer(run)
    assert train(run, first, range(5)) == train(run, again, range(5))
    assert first.queues() == again.queues()


@on_disk
def test_queues_are_as_of_the_newest_record_whatever_was_drawn_since(run: Run):
    buffer = make_buffer(run)
    train(run, buffer, range(2))
    queues = buffer.queues()
    buffer.draw(3)
    assert buffer.queues() == queues


@on_disk
def test_a_users_sampler_is_checked_before_anything_starts(run: Run):
    with pytest.raises(ConfigError, match=r"^sampler SQL: .*slot"):
        make_buffer(run, sampler_sql="select 1")
