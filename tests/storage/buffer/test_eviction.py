"""Which responses stay drawable: equal content, capacity, and which are evicted first."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from storage.buffer import drawable_rows
from tba.types import Trajectory
from tests.support.builders import make_shard, make_trajectory
from tests.support.storage.indexes import admit, drawable, make_eligibility, make_index
from tests.support.storage.oracle import Oracle, Row

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
