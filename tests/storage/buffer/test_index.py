import math
from collections import Counter
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.buffer import drawable_rows
from storage.buffer.index import Index
from storage.buffer.sampler import default_sampler
from storage.log.schema import to_table
from tba.errors import Damaged, RunFailed
from tba.types import Draw, Trajectory, Version
from tests.support.builders import make_shard, make_trajectory
from tests.support.storage.chance import agree
from tests.support.storage.indexes import admit, drawable, make_eligibility, make_index, oracle_rows, prompts, used
from tests.support.storage.oracle import Drawn, Oracle, Row

# --- equal to the oracle ----------------------------------------------------------------------------------------------

SHARD = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c", "prompt d"]),
        st.integers(0, 5),  # number of the response: equal numbers are equal content
        st.floats(-3, 3),
    ),
    min_size=1,
    max_size=6,
)
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


def assert_same(draws: Sequence[Draw], expected: Sequence[Drawn], step: int) -> None:
    assert [(d.step, d.slot, d.position, d.trajectory_id, d.prompt_id, d.branch) for d in draws] == [
        (step, *drawn[:5]) for drawn in expected
    ]
    assert [d.weight for d in draws] == pytest.approx([drawn.weight for drawn in expected], rel=1e-9)


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


# --- which branch and which prompt ------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_a_slot_is_recent_with_probability_m(share: float):
    index = make_index(slots=2000, recent_share=share)
    admit(index, 0, make_shard({"a": [0.0, 0.0]}))
    counts = Counter(draw.branch for draw in index.draw(1) if draw.position == 0)
    assert agree(counts, {"recent": share, "prioritised": 1 - share})


@pytest.mark.parametrize(("share", "branch"), [(0.0, "prioritised"), (1.0, "recent")])
def test_the_extremes_of_m_are_certain(share: float, branch: str):
    index = make_index(slots=500, recent_share=share)
    admit(index, 0, make_shard({"a": [0.0, 0.0]}))
    assert {draw.branch for draw in index.draw(1)} == {branch}


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_each_prompt_is_drawn_once_before_any_is_drawn_again(share: float):
    index = make_index(slots=4, recent_share=share)
    names = [f"p{n}" for n in range(10)]
    admit(index, 0, make_shard({name: [0.0, 1.0] for name in names}))
    drawn = [prompt for step in range(1, 16) for prompt in prompts(index.draw(step))]
    epochs = [drawn[start : start + 10] for start in range(0, 60, 10)]
    assert all(sorted(epoch) == names for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6


def test_an_epoch_begins_with_any_prompt_alike():
    index = make_index(slots=5 * 1000, recent_share=0.0, responses=1)
    names = [f"p{n}" for n in range(5)]
    admit(index, 0, make_shard({name: [0.0] for name in names}))
    drawn = prompts(index.draw(1))
    assert agree(Counter(drawn[::5]), dict.fromkeys(names, 1 / 5))
    assert agree(Counter(drawn[1::5]), dict.fromkeys(names, 1 / 5))


def test_an_epoch_takes_any_order_alike():
    index = make_index(slots=4 * 1500, recent_share=0.0, responses=1)
    names = [f"p{n}" for n in range(4)]
    admit(index, 0, make_shard({name: [0.0] for name in names}))
    drawn = prompts(index.draw(1))
    orders = Counter(tuple(drawn[start : start + 4]) for start in range(0, len(drawn), 4))
    assert agree(orders, dict.fromkeys(permutations(names), 1 / 24))


def test_a_prompt_that_joins_is_drawn_within_the_epoch():
    index = make_index(slots=2, recent_share=0.0)
    admit(index, 0, make_shard({f"p{n}": [0.0, 1.0] for n in range(6)}))
    before = prompts(index.draw(1)) + prompts(index.draw(2))
    admit(index, 1, make_shard({"new": [0.0], "p0": [0.5]}, round=1))
    after = [prompt for step in (3, 4, 5) for prompt in prompts(index.draw(step))]
    assert sorted(before + after[:3]) == ["new", *(f"p{n}" for n in range(6))]


def test_the_recent_prompts_are_those_of_the_newest_record_and_begin_anew_with_it():
    index = make_index(slots=3, recent_share=1.0)
    admit(index, 0, make_shard({"a": [0.0, 1.0], "b": [0.0, 1.0], "c": [0.0, 1.0], "d": [0.0, 1.0]}))
    assert set(prompts(index.draw(1))) < set("abcd")
    admit(index, 1, make_shard({"b": [2.0, 3.0], "c": [2.0], "d": [4.0]}, round=1))
    draws = index.draw(2)
    assert set(prompts(draws)) == set("bcd")
    assert {draw.trajectory_id.split("/")[1] for draw in draws} == {"1"}


def test_a_record_of_nothing_leaves_everything_as_it_was():
    index, other = make_index(recent_share=1.0), make_index(recent_share=1.0)
    for it in (index, other):
        admit(it, 0, make_shard({"a": [0.0, 1.0], "b": [0.0, 1.0], "c": [0.0, 1.0]}))
        it.draw(1)
    index.extend(1, [], step=0)
    assert index.newest == 0
    assert index.draw(2) == other.draw(2)


# --- prompts that are neither too easy nor too hard -------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_prompts_whose_mean_reward_is_at_a_bound_or_beyond_are_not_drawn(share: float):
    index = make_index(slots=3, recent_share=share, mean_reward_between=(0.0, 1.0))
    rewards = {
        "never": [0.0] * 3,
        "always": [1.0] * 3,
        "half": [0.0, 1.0],
        "rarely": [0.0, 0.0, 0.0, 1.0],
        "far": [9.0],
    }
    admit(index, 0, make_shard(rewards))
    drawn = [prompt for step in range(1, 5) for prompt in prompts(index.draw(step))]
    assert [set(drawn[start : start + 2]) for start in range(0, 12, 2)] == [{"half", "rarely"}] * 6


def test_the_bounds_are_met_exactly_whatever_is_rounded_on_the_way():
    index = make_index(slots=4, recent_share=0.0, mean_reward_between=(0.1, 0.3))
    rewards = {"low": [0.1] * 3, "high": [0.5, 0.25, 0.25, 0.25, 0.25], "within": [0.1, 0.1, 0.1000001]}
    admit(index, 0, make_shard(rewards))
    assert sum(rewards["low"]) / 3 > 0.1 and sum(rewards["high"]) / 5 == 0.3
    assert set(prompts(index.draw(1))) == {"within"}


def test_what_counts_is_what_could_be_drawn_of_a_prompt_now():
    index = make_index(slots=1, recent_share=0.0, capacity=2, mean_reward_between=(0.0, 1.0))
    admit(index, 0, make_shard({"a": [0.0, 1.0], "b": [0.0, 0.0]}))
    assert {prompt for step in range(1, 4) for prompt in prompts(index.draw(step))} == {"a"}
    admit(index, 1, make_shard({"a": [1.0], "b": [0.5]}, round=1))
    assert {prompt for step in range(4, 7) for prompt in prompts(index.draw(step))} == {"b"}
    admit(index, 2, make_shard({"a": [0.5]}, round=2))
    assert {prompt for step in range(7, 10) for prompt in prompts(index.draw(step))} == {"a", "b"}


def test_a_branch_without_a_prompt_within_the_bounds_draws_from_all_of_its_own():
    index = make_index(slots=8, recent_share=0.5, mean_reward_between=(0.0, 1.0))
    admit(index, 0, make_shard({"easy": [1.0] * 2, "hard": [0.0] * 2}))
    assert set(prompts(index.draw(1))) == {"easy", "hard"}
    admit(index, 1, make_shard({"apt": [0.0, 1.0], "easy": [1.0]}, round=1))
    admit(index, 2, make_shard({"easy": [1.0], "hard": [0.0]}, round=2))
    drawn = {(draw.branch, draw.prompt_id) for step in range(2, 5) for draw in index.draw(step)}
    assert drawn == {("recent", "easy"), ("recent", "hard"), ("prioritised", "apt")}


def test_rewards_whose_sum_no_number_holds_have_a_mean():
    index = make_index(slots=2, recent_share=0.0, mean_reward_between=(0.0, 1e300))
    admit(index, 0, make_shard({"vast": [1e308] * 3, "none": [1e308, 1e308, -1e308, -1e308], "a": [0.0, 1.0]}))
    assert set(prompts(index.draw(1))) == {"a"}


def test_restored_queues_continue_the_same_draws_within_bounds():
    rewards = [{f"p{n}": [0.0, n % 3 / 2] for n in range(7)} for _ in range(2)]
    again, index = (make_index(mean_reward_between=(0.1, 0.6)) for _ in range(2))
    for sync, shard in enumerate(rewards):
        admit(index, sync, make_shard(shard, round=sync))
        index.draw(sync + 1)
    for sync, shard in enumerate(rewards):
        admit(again, sync, make_shard(shard, round=sync))
    again.restore(index.queues())
    ahead = [index.draw(step) for step in range(3, 7)]
    assert [again.draw(step) for step in range(3, 7)] == ahead
    assert {prompt for draws in ahead for prompt in prompts(draws)} == {"p1", "p2", "p4", "p5"}


def test_a_users_sampler_sees_of_the_queue_what_slots_can_take():
    of_the_queue = """
        with taken as (
          select prompt, row_number() over (order by prompt_id) - 1 as slot from queue
          where branch = 'prioritised' qualify slot < $slots
        )
        select slot, 0 as position, max(trajectory_id) as trajectory_id, prompt_id, 'prioritised' as branch, 1 as weight
        from pool join taken using (prompt) group by slot, prompt_id
    """
    index = make_index(slots=2, responses=1, sampler_sql=of_the_queue, mean_reward_between=(0.0, 1.0))
    admit(index, 0, make_shard({"a": [0.0, 1.0], "b": [1.0], "c": [0.5], "d": [0.0]}))
    assert prompts(index.draw(1)) == ["a", "c"]


# --- which responses --------------------------------------------------------------------------------------------------

REWARDS = {"0/0/0": 0.0, "0/0/1": 0.5, "0/0/2": 1.0, "0/0/3": 2.0}


def softmax(inv_temp: float) -> dict[str, float]:
    weights = {it: math.exp(inv_temp * reward) for it, reward in REWARDS.items()}
    return {it: weight / sum(weights.values()) for it, weight in weights.items()}


def draw_many(*, responses: int, inv_temp: float, rewards: Sequence[float] = tuple(REWARDS.values())) -> list[Draw]:
    index = make_index(slots=4000, responses=responses, recent_share=0.0, inv_temp=inv_temp)
    admit(index, 0, make_shard({"a": rewards}))
    return index.draw(1)


@pytest.mark.parametrize("inv_temp", [0.0, 1.0])
def test_one_response_is_drawn_by_the_softmax_of_its_reward(inv_temp: float):
    draws = draw_many(responses=1, inv_temp=inv_temp)
    assert agree(Counter(draw.trajectory_id for draw in draws), softmax(inv_temp))
    assert all(draw.weight == pytest.approx(softmax(inv_temp)[draw.trajectory_id]) for draw in draws)


@pytest.mark.parametrize("inv_temp", [0.0, 1.0])
def test_several_responses_are_drawn_one_after_the_other_without_replacement(inv_temp: float):
    draws = draw_many(responses=2, inv_temp=inv_temp)
    pairs = Counter((a.trajectory_id, b.trajectory_id) for a, b in zip(draws[::2], draws[1::2], strict=True))
    p = softmax(inv_temp)
    assert agree(pairs, {(a, b): p[a] * p[b] / (1 - p[a]) for a, b in permutations(p, 2)})  # Plackett-Luce


def test_recent_responses_are_drawn_uniformly_whatever_their_reward():
    index = make_index(slots=4000, responses=1, recent_share=1.0, inv_temp=5.0)
    admit(index, 0, make_shard({"a": list(REWARDS.values())}))
    draws = index.draw(1)
    assert agree(Counter(draw.trajectory_id for draw in draws), dict.fromkeys(REWARDS, 1 / 4))
    assert {draw.weight for draw in draws} == {0.25}


def test_a_large_range_of_rewards_still_gives_distinct_responses():
    draws = draw_many(responses=3, inv_temp=1e6, rewards=[0.0, 1.0, 1e6, -1e9])
    assert {draw.trajectory_id for draw in draws} == {"0/0/0", "0/0/1", "0/0/2"}
    assert {(draw.position, draw.trajectory_id) for draw in draws} == {(0, "0/0/2"), (1, "0/0/1"), (2, "0/0/0")}


def test_fewer_responses_than_wanted_are_drawn_with_replacement():
    draws = draw_many(responses=3, inv_temp=0.0, rewards=[0.0, 1.0])
    triples = Counter(
        tuple(draw.trajectory_id for draw in draws[start : start + 3]) for start in range(0, len(draws), 3)
    )
    ids = ("0/0/0", "0/0/1")
    assert agree(triples, {(a, b, c): 1 / 8 for a in ids for b in ids for c in ids})


def test_fewer_recent_responses_than_wanted_are_repeated_rather_than_mixed_with_older_ones():
    index = make_index(slots=20, responses=4, recent_share=1.0)
    admit(index, 0, make_shard({"a": [0.0] * 10}))
    admit(index, 1, make_shard({"a": [1.0, 2.0]}, round=1))
    assert {draw.trajectory_id for draw in index.draw(1)} == {"0/1/0", "0/1/1"}


# --- equal content and capacity ---------------------------------------------------------------------------------------


def test_equal_content_is_there_once_as_its_newest_copy():
    index = make_index(slots=50, responses=3, recent_share=1.0)
    copies = [make_trajectory("a", tokens=(5, 2), searcher=s, round=r) for s, r in ((0, 0), (0, 1), (1, 0))]
    admit(index, 0, [copies[0], make_trajectory("a", tokens=(6, 2), slot=1)], [copies[1]])
    assert drawable(index) == ["0/0/1", "0/1/0"]
    admit(index, 1, [copies[2]])
    assert drawable(index) == ["0/0/1", "1/0/0"]
    assert {draw.trajectory_id for draw in index.draw(1)} == {"1/0/0"}


def test_content_that_was_put_out_is_new_when_it_comes_again():
    index = make_index(capacity=2)
    for round, token in enumerate((1, 2, 3, 1)):
        admit(index, round, [make_trajectory("a", tokens=(token,), round=round)])
    assert drawable(index) == ["0/2/0", "0/3/0"]


def test_content_repeated_within_a_sync_counts_once_among_the_recent():
    index = make_index(slots=1, responses=3, recent_share=1.0)
    admit(index, 0, make_shard({"a": [0.0] * 3}))
    again = [make_trajectory("a", tokens=(9, 2), round=r) for r in (1, 2)]
    admit(index, 1, [again[0], make_trajectory("a", tokens=(8, 2), slot=1, round=1)], [again[1]])
    ids = {draw.trajectory_id for step in range(1, 30) for draw in index.draw(step)}
    assert ids == {"0/1/1", "0/2/0"}


def test_equal_responses_to_other_prompts_are_other_content():
    index = make_index()
    admit(index, 0, [make_trajectory("a"), make_trajectory("b")])
    assert len(drawable(index)) == 2


def test_capacity_keeps_the_newest_of_each_prompt():
    index = make_index(capacity=3)
    admit(index, 0, make_shard({"a": [0.0, 0.1], "b": [0.2]}))
    admit(index, 1, make_shard({"a": [1.0, 1.1]}, round=1))
    assert drawable(index) == ["0/0/1", "0/0/2", "0/1/0", "0/1/1"]
    admit(index, 2, make_shard({"a": [2.0] * 5}, round=2))
    assert drawable(index) == ["0/0/2", "0/2/2", "0/2/3", "0/2/4"]


def test_duplicates_do_not_push_others_out():
    index = make_index(capacity=2)
    admit(index, 0, [make_trajectory("a", tokens=(1,)), make_trajectory("a", tokens=(2,), slot=1)])
    admit(index, 1, [make_trajectory("a", tokens=(2,), round=1), make_trajectory("a", tokens=(2,), slot=1, round=1)])
    assert drawable(index) == ["0/0/0", "0/1/1"]


# --- the worst go first -----------------------------------------------------------------------------------------------


def rewarded(*rewards: float, round: int) -> list[Trajectory]:
    """Make a shard of one prompt. Rewards with the same first two decimals belong to equal content."""
    return [
        make_trajectory("a", tokens=(int(reward * 100),), reward=reward, slot=slot, round=round)
        for slot, reward in enumerate(rewards)
    ]


def test_where_the_worst_go_first_the_best_stay_and_what_came_last():
    index = make_index(capacity=3, evict="worst")
    admit(index, 0, rewarded(0.1, 0.9, 0.5, 0.7, 0.3, round=0))
    assert drawable(index) == ["0/0/0", "0/0/1", "0/0/2", "0/0/3", "0/0/4"]
    admit(index, 1, rewarded(0.6, 0.2, round=1))
    assert drawable(index) == ["0/0/1", "0/0/3", "0/1/0", "0/1/1"]
    assert {draw.trajectory_id for draw in index.draw(1) if draw.branch == "recent"} <= {"0/1/0", "0/1/1"}
    admit(index, 2, [make_trajectory("b", round=2)])
    assert drawable(index) == ["0/0/1", "0/0/3", "0/1/0", "0/1/1", "0/2/0"]
    admit(index, 3, rewarded(0.0, round=3))
    assert drawable(index) == ["0/0/1", "0/0/3", "0/1/0", "0/2/0", "0/3/0"]


def test_of_equal_rewards_the_newest_stays():
    index = make_index(capacity=2, evict="worst")
    for round, token in enumerate((1, 2, 3)):
        admit(index, round, [make_trajectory("a", tokens=(token,), reward=0.5, round=round)])
    assert drawable(index) == ["0/1/0", "0/2/0"]


def test_content_stays_as_its_newest_copy_by_the_best_reward_that_it_ever_had():
    index = make_index(capacity=2, evict="worst")
    admit(index, 0, rewarded(0.501, 0.6, 0.7, round=0))
    admit(index, 1, rewarded(0.909, round=1))
    admit(index, 2, [make_trajectory("a", tokens=(90,), reward=0.0, round=2)])  # the same again, with less reward
    admit(index, 3, rewarded(0.1, round=3))
    assert drawable(index) == ["0/0/2", "0/2/0", "0/3/0"]


def enter(it: drawable_rows.DrawableRows, sync: int, record: Sequence[tuple[str, int, int]]) -> set[str]:
    """Admit a record of one shard of prompts, contents and rewards. Return the places of the rows that can be drawn."""
    prompts, contents, rewards = zip(*record, strict=True)
    it.prompt_ids += [prompt for prompt in dict.fromkeys(prompts) if prompt not in it.prompt_ids]
    columns = {
        "prompt": np.array([it.prompt_ids.index(prompt) for prompt in prompts], np.int32),
        "content": np.array([content.to_bytes(16, "big") for content in contents], "V16"),
        "reward": np.array(rewards, float),
    }
    ones = np.ones(len(record), np.int32)
    it.extend(
        sync,
        [drawable_rows.Arrival(0, sync, len(record))],
        columns | dict.fromkeys(("version", "length", "finished"), ones),
        step=0,
    )
    return set(map(str, it.places(range(len(it.prompt_ids)))[0].tolist()))


@given(
    records=st.lists(
        st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=6),
        min_size=1,
        max_size=8,
    ),
    capacity=st.integers(1, 4),
)
def test_what_stays_follows_from_all_that_entered_and_a_smaller_pool_holds_a_part(
    records: list[list[tuple[str, int, int]]], capacity: int
):
    larger, smaller = (drawable_rows.DrawableRows(make_eligibility(it, "worst")) for it in (capacity + 1, capacity))
    oracle = Oracle(slots=1, responses=1, recent_share=0.5, capacity=capacity + 1, evict="worst")
    gone: set[str] = set()
    for sync, record in enumerate(records):
        first = len(oracle.entered)
        oracle.admit(
            sync, [Row(str(first + i), prompt, str(it), reward) for i, (prompt, it, reward) in enumerate(record)]
        )
        held = enter(larger, sync, record)
        assert held == {row.trajectory_id for prompt in "ab" for _, row in oracle.surviving(prompt)}
        assert enter(smaller, sync, record) <= held and not held & gone
        gone |= {row.trajectory_id for _, row in oracle.entered} - held


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


def test_all_copies_of_a_response_are_drawn_as_often_as_they_were_generated():
    index = make_index(slots=1, responses=4, recent_share=1.0, copies="all")
    said = [(5,), (5,), (5,), (6,)]
    admit(index, 0, [make_trajectory("p", tokens=tokens, slot=slot) for slot, tokens in enumerate(said)])
    assert sorted(draw.trajectory_id for draw in index.draw(1)) == [f"0/0/{row}" for row in range(4)]
