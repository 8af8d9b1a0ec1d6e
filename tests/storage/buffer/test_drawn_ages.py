"""The ages of drawn responses, with and without a bound."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.buffer.index import Index
from tba.errors import RunFailed
from tba.types import Draw, Version
from tests.support.builders import make_shard, make_trajectory
from tests.support.storage.indexes import admit, drawable, make_index, oracle_rows, used
from tests.support.storage.oracle import SHARD, Oracle, assert_same

# --- age --------------------------------------------------------------------------------------------------------------


def ages_with_period(k: int, syncs: int) -> list[list[int]]:
    """Return the ages of recent draws between two syncs, if sync n admits responses of version n - 1."""
    index = make_index(slots=2, recent_share=1.0, step_of_version=lambda version: version.number * k)
    windows = []
    for sync in range(syncs):
        version = max(sync - 1, 0)
        admit(index, sync, make_shard({"a": [0.0, 1.0]}, round=sync, version_start=Version(version, 1)))
        steps = range(sync * k + 1, (sync + 1) * k + 1)
        windows.append([draw.age for step in steps for draw in index.draw(step) if draw.position == 0])
    return windows


@pytest.mark.parametrize("k", [1, 2, 5])
def test_recent_ages_are_uniform_between_k_and_2k_minus_1(k: int):
    first, *later = ages_with_period(k, 4)
    assert sorted(set(first)) == list(range(k))
    for window in later:
        assert Counter(window) == dict.fromkeys(range(k, 2 * k), 2)
        assert sum(window) / len(window) == (3 * k - 1) / 2


def test_age_is_counted_from_the_version_a_response_began_with():
    index = make_index(slots=1, recent_share=1.0, step_of_version=lambda version: 10 * version.number + version.attempt)
    admit(index, 0, make_shard({"a": [0.0]}, version_start=Version(2, 3), version_end=Version(4, 3)))
    assert {draw.age for draw in index.draw(31)} == {7}


# --- a bound on age ---------------------------------------------------------------------------------------------------

K = 2  # steps per sync


@settings(max_examples=40, deadline=None)
@given(
    records=st.lists(st.lists(st.tuples(st.integers(0, 4), SHARD), max_size=2), min_size=1, max_size=6),
    max_age=st.integers(0, 9),
    seed=st.integers(0, 10**6),
    recent_share=st.sampled_from([0.0, 0.5, 1.0]),
    capacity=st.integers(1, 4),
    copies=st.sampled_from(["newest", "all"]),
    mean_reward_between=st.sampled_from([None, (-1.0, 1.0), (5.0, 6.0)]),
    left=st.integers(0, 5),
)
def test_draws_of_a_bounded_age_are_those_of_the_oracle_and_the_same_on_resume(
    records: Sequence[Any], left: int, **rule: Any
):
    """Shards have versions that are a number of syncs behind. The resumed trainer continues after record `left`,
    without earlier draws."""
    index, oracle = make_index(**rule, step_of_version=lambda it: it.number * K), Oracle(slots=4, responses=2, **rule)
    admitted, queues, taken = [], [], []
    for sync, record in enumerate(records):
        shards = [
            [
                make_trajectory(prompt, tokens=(n,), reward=r, slot=slot, searcher=place, round=sync, version=version)
                for slot, (prompt, n, r) in enumerate(spec)
            ]
            for place, (behind, spec) in enumerate(record)
            for version in [max(0, sync - behind)]
        ]
        admitted.append(shards)
        admit(index, sync, *shards, step=sync * K)
        queues.append(index.queues())
        oracle.admit(sync, [row for shard in shards for row in oracle_rows(shard, k=K)], sync * K)
        steps = range(sync * K + 1, sync * K + K + 1)
        taken.append([drawn(index, oracle, step) for step in steps])
        assert used(index) == oracle.used
    resumed = make_index(**rule, step_of_version=lambda it: it.number * K)
    for sync, shards in enumerate(admitted):
        admit(resumed, sync, *shards, step=sync * K)
        if sync == left:
            resumed.restore(queues[sync])
        if sync >= left:
            steps = zip(range(sync * K + 1, sync * K + K + 1), taken[sync], strict=True)
            assert all(resumed.draw(step) == before for step, before in steps if before)


def drawn(index: Index, oracle: Oracle, step: int) -> list[Draw]:
    """Return a draw, after a check that the oracle draws the same. Empty if all rows are too old."""
    if not any(oracle.drawable(row.prompt_id, step) for _, row in oracle.entered):
        with pytest.raises(RunFailed, match="nothing"):
            index.draw(step)
        return []
    draws = index.draw(step)
    assert_same(draws, oracle.draw(step), step)
    assert max(draw.age for draw in draws) <= oracle.max_age
    return draws


def test_a_response_is_drawn_up_to_the_greatest_age_and_not_at_the_next_step():
    index = make_index(slots=1, recent_share=1.0, max_age=5, step_of_version=lambda it: it.number * K)
    admit(index, 0, make_shard({"a": [0.0]}))
    assert [(draw.age, draw.branch) for draw in index.draw(6)] == [(5, "recent")] * 2
    with pytest.raises(RunFailed, match=r"step 7: there is nothing to draw: .* sampling\.max_age, 5"):
        index.draw(7)


def test_where_nothing_recent_is_young_enough_all_slots_are_prioritised():
    index = make_index(recent_share=1.0, max_age=5, step_of_version=lambda it: it.number * K)
    admit(index, 0, make_shard({"a": [0.0]}, round=0), step=0)
    admit(index, 1, make_shard({"b": [0.0]}, round=1, version_start=Version(1, 1)), step=2)
    admit(index, 2, make_shard({"c": [0.0]}, round=2), step=4)  # from a searcher that is behind
    assert {(draw.prompt_id, draw.branch) for draw in index.draw(5)} == {("c", "recent")}
    assert {(draw.prompt_id, draw.branch) for draw in index.draw(7)} == {("b", "prioritised")}
    assert not index.branches.by_branch["recent"].has_none_left, "no bounds on rewards are in the way"
    admit(index, 3, make_shard({"b": [0.0], "c": [0.0]}, round=3), step=7)  # too old when it enters
    assert {(draw.prompt_id, draw.branch) for draw in index.draw(8)} == {("b", "prioritised")}


def test_what_is_too_old_when_it_enters_takes_no_copys_place():
    index = make_index(capacity=1, max_age=5, step_of_version=lambda it: it.number * K)
    admit(index, 3, make_shard({"a": [0.5]}, round=3, version_start=Version(3, 1)), step=6)
    young = drawable(index)
    late = make_shard({"a": [0.5, 1.0]}, round=4, version_start=Version(1, 1))  # 6 steps old at the next step
    admit(index, 4, late, make_shard({"b": [0.0]}, searcher=1, round=4, version_start=Version(4, 1)), step=8)
    assert drawable(index) == [*young, "1/4/0"]


def test_what_a_draw_costs_does_not_depend_on_what_has_grown_too_old():
    """The index keeps nothing about versions without any response left."""
    index = make_index(max_age=3, step_of_version=lambda it: it.number * K)
    for sync in range(50):
        admit(index, sync, make_shard({f"p{sync}": [0.0]}, round=sync, version_start=Version(sync, 1)), step=sync * K)
        index.draw(sync * K + 1)
        assert len(index.pool.young) <= 2
