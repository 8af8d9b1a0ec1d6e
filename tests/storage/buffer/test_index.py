"""Draws of an index equal those of the oracle and follow from seed, sampler and records. An index
refuses queues and versions that do not fit."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.buffer import drawable_rows
from storage.buffer.sampler import default_sampler
from storage.log.schema import to_table
from tba.errors import Damaged, RunFailed
from tba.types import Version
from tests.support.builders import make_shard, make_trajectory
from tests.support.storage.indexes import admit, drawable, make_index, oracle_rows, used
from tests.support.storage.oracle import SHARD, Oracle, assert_same

# --- equal to the oracle ----------------------------------------------------------------------------------------------

RECORD = st.lists(SHARD, max_size=3)


@settings(max_examples=30, deadline=None)
@given(
    records=st.lists(RECORD, min_size=1, max_size=4),
    seed=st.integers(0, 10**6),
    slots=st.integers(1, 9),
    responses=st.integers(1, 4),
    recent_share=st.sampled_from([0.0, 0.3, 0.95, 1.0]),
    inv_temp=st.sampled_from([0.0, 1.0, 1000.0]),
    capacity=st.integers(1, 5),
    evict=st.sampled_from(["oldest", "worst"]),
    copies=st.sampled_from(["newest", "all"]),
    mean_reward_between=st.sampled_from([None, (-1.0, 1.0), (0.0, 0.5), (5.0, 6.0)]),
)
def test_draws_are_those_of_the_oracle(records: Sequence[Any], **settings: Any):
    index, oracle, step, seq = make_index(**settings), Oracle(**settings), 0, 0
    for sync, record in enumerate(records):
        shards = []
        for spec in record:
            trajectories = [
                make_trajectory(prompt_id, tokens=(response,), reward=reward, slot=slot, searcher=seq % 2, round=seq)
                for slot, (prompt_id, response, reward) in enumerate(spec)
            ]
            shards.append(trajectories)
            seq += 1
        admit(index, sync, *shards)
        in_order = sorted(shards, key=lambda shard: (shard[0].searcher, shard[0].round))
        oracle.admit(sync, [row for shard in in_order for row in oracle_rows(shard)])
        for _ in range(2 if oracle.entered else 0):
            step += 1
            assert_same(index.draw(step), oracle.draw(step), step)
            assert used(index) == oracle.used


def test_draws_are_those_of_the_oracle_wherever_the_rows_lie(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(drawable_rows, "PIECE", 4)
    index, oracle = make_index(capacity=3, inv_temp=1.0), Oracle(slots=4, responses=2, recent_share=0.5, capacity=3)
    oracle.inv_temp = 1.0
    for sync in range(6):
        shard = [
            make_trajectory(f"p{n % 5}", tokens=((n * sync) % 7,), reward=n / 9, slot=n, round=sync) for n in range(10)
        ]
        admit(index, sync, shard)
        oracle.admit(sync, oracle_rows(shard))
        for step in (2 * sync + 1, 2 * sync + 2):
            assert_same(index.draw(step), oracle.draw(step), step)


def test_what_is_in_front_are_the_rows_of_the_prompts_whose_turn_it_is():
    general = default_sampler().replace("join front", "join pool as front")
    assert general != default_sampler()
    indexes = [make_index(inv_temp=1.0, capacity=3, sampler_sql=sql) for sql in (default_sampler(), general)]
    for sync in range(4):
        shard = make_shard({f"p{(3 * sync + n) % 11}": [0.0, n / 2] for n in range(5)}, round=sync)
        for index in indexes:
            admit(index, sync, shard)
        for step in (2 * sync + 1, 2 * sync + 2):
            drawn, by_pool = (index.draw(step) for index in indexes)
            assert drawn == by_pool
    con = indexes[0].tables.con
    counting = "select count(*), count(*) filter (prompt not in (select prompt from turns)) from front"
    [(rows, others)] = con.execute(counting).fetchall()
    assert (others, rows > 0) == (0, True)


# --- a pure function of seed, sampler and records ---------------------------------------------------------------------


def big_table(n: int, prompts: int, seed: int = 0) -> pa.Table:
    """Return a table with enough rows for several threads."""
    random = np.random.default_rng(seed)
    return pa.table(
        {
            "trajectory_id": [f"0/{seed}/{row}" for row in range(n)],
            "prompt_id": [f"train/{it}" for it in random.integers(0, prompts, n)],
            "content_hash": [f"{it:032x}" for it in random.integers(0, n, n)],
            "reward": random.random(n),
            "length": pa.array([1] * n, pa.int32()),
            "finished": [True] * n,
            "version_start": pa.array([0] * n, pa.int32()),
            "version_start_attempt": pa.array([1] * n, pa.int32()),
        }
    )


def test_draws_do_not_depend_on_the_number_of_threads():
    draws = []
    for threads in (1, 4):
        index = make_index(threads=threads, slots=32, responses=8, inv_temp=1.0, capacity=64)
        index.extend(0, [("0/0", big_table(130_000, 2000))], step=0)
        index.extend(1, [("0/1", big_table(10_000, 2000, seed=1))], step=0)
        draws.append([index.draw(step) for step in (1, 2)])
    assert draws[0] == draws[1]


def test_draws_do_not_depend_on_the_chunks_of_a_shards_table():
    whole, parts = make_index(inv_temp=1.0), make_index(inv_temp=1.0)
    shard = make_shard({"a": [0.0, 1.0, 2.0], "b": [1.0, 1.5], "c": [0.0]})
    table = to_table(shard, run="r", searcher=0, seq=0)
    whole.extend(0, [("0/0", table)], step=0)
    parts.extend(0, [("0/0", pa.concat_tables([table.slice(0, 2), table.slice(2)]))], step=0)
    assert [whole.draw(step) for step in range(1, 5)] == [parts.draw(step) for step in range(1, 5)]


def test_the_seed_matters():
    draws = []
    for seed in (0, 1):
        index = make_index(seed=seed)
        admit(index, 0, make_shard({"a": [0.0] * 9, "b": [0.0] * 9}))
        draws.append(index.draw(1))
    assert draws[0] != draws[1]


def test_restored_queues_continue_the_same_draws():
    shards = [make_shard({f"p{n}": [0.0, 1.0] for n in range(7)}, round=sync) for sync in range(2)]
    index = make_index()
    for sync, shard in enumerate(shards):
        admit(index, sync, shard)
        index.draw(sync + 1)
    queues = index.queues()
    ahead = [index.draw(step) for step in (3, 4)]

    again = make_index()
    for sync, shard in enumerate(shards):
        admit(again, sync, shard)
    again.restore(queues)
    assert again.queues() == queues
    assert [again.draw(step) for step in (3, 4)] == ahead
    index.restore(queues)
    assert [index.draw(step) for step in (3, 4)] == ahead


GOOD = {"prompts": 3, "used": "a0"}
OTHERS = {
    "of more prompts": ({"prompts": 4, "used": "a0"}, "it has 8 bits of 4 prompts, but the records have 3"),
    "of fewer bits": ({"prompts": 3, "used": ""}, "it has 0 bits of 3 prompts, but the records have 3"),
    "of no bits": ({"prompts": 3, "used": "yes"}, "non-hexadecimal"),
    "of another shape": (["a"], "list indices"),
    "missing": (None, "NoneType"),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("branch", ["recent", "prioritised"])
def test_queues_of_another_run_are_refused(branch: str, kind: str):
    state, why = OTHERS[kind]
    index = make_index()
    admit(index, 0, make_shard({"a": [0.0], "b": [0.0], "c": [0.0]}))
    index.restore({"recent": GOOD, "prioritised": GOOD})
    assert used(index) == {"recent": {"a", "c"}, "prioritised": {"a", "c"}}
    with pytest.raises(Damaged, match=f"queue '{branch}' cannot be restored: .*{why}"):
        index.restore({"recent": GOOD, "prioritised": GOOD, branch: state})


def test_nothing_can_be_drawn_from_nothing():
    with pytest.raises(RunFailed, match="step 1: there is nothing to draw"):
        make_index().draw(1)


# --- what can be admitted ---------------------------------------------------------------------------------------------


def test_a_version_that_follows_no_step_an_index_can_hold_is_refused():
    table = to_table(make_shard({"a": [0.0]}), run="r", searcher=0, seq=0)
    make_index(step_of_version=lambda version: 2**31 - 1).check(table)
    with pytest.raises(Damaged, match="it does not fit the index"):
        make_index(step_of_version=lambda version: 2**31).check(table)


def test_a_version_that_nobody_published_is_refused_in_the_words_of_who_knows():
    def step_of_version(version: Version) -> int:
        raise Damaged(f"no record speaks of version {version}")

    table = to_table(make_shard({"a": [0.0]}, version_start=Version(7, 2)), run="r", searcher=0, seq=0)
    index = make_index(step_of_version=step_of_version)
    with pytest.raises(Damaged, match=r"^no record speaks of version 000007-a0002$"):
        index.check(table)


def test_checking_admits_nothing():
    index, other = make_index(), make_index()
    for it in (index, other):
        admit(it, 0, make_shard({"a": [0.0, 1.0], "b": [0.0, 1.0]}))
    index.check(to_table(make_shard({"c": [0.0]}, round=1), run="r", searcher=0, seq=1))
    assert drawable(index) == drawable(other)
    assert index.queues() == other.queues()
    assert [index.draw(step) for step in (1, 2)] == [other.draw(step) for step in (1, 2)]
