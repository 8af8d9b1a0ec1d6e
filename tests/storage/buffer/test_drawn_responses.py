"""Which responses to a prompt a draw takes, and with which probability."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import permutations

import pytest

from tba.types import Draw
from tests.support.builders import make_shard, make_trajectory
from tests.support.storage.chance import agree
from tests.support.storage.indexes import admit, make_index

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


def test_all_copies_of_a_response_are_drawn_as_often_as_they_were_generated():
    index = make_index(slots=1, responses=4, recent_share=1.0, copies="all")
    said = [(5,), (5,), (5,), (6,)]
    admit(index, 0, [make_trajectory("p", tokens=tokens, slot=slot) for slot, tokens in enumerate(said)])
    assert sorted(draw.trajectory_id for draw in index.draw(1)) == [f"0/0/{row}" for row in range(4)]
