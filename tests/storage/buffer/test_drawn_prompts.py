"""Which branch and which prompts a draw takes, also with bounds on the mean reward."""

from collections import Counter
from itertools import permutations

import pytest

from tests.support.builders import make_shard
from tests.support.storage.chance import agree
from tests.support.storage.indexes import admit, make_index, prompts

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
