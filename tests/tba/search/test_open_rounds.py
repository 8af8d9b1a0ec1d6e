"""Several open rounds, with any order of finished groups and any deaths of searchers."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness import fakes
from tba.config import SearchConfig
from tba.search.open_rounds import SHARDS_PER_ROUND, Group, Rounds
from tba.search.prompt_stream import PromptStream
from tba.types import Asked


def stream(prompts: int = 10, *, seed: int = 7) -> PromptStream:
    return PromptStream(fakes.make_prompts(prompts), seed=seed, searcher=0, searchers=1, shuffle=True)


def config(*, prompts: int = 3, responses: int = 2, open_rounds: int = 2) -> SearchConfig:
    return SearchConfig(prompts_per_round=prompts, responses_per_prompt=responses, open_rounds=open_rounds)


def asked_for(groups: list[Group]) -> list[Asked]:
    return [Asked(it.round, slot, it.prompt.prompt_id) for it in groups for slot in it.slots]


@given(
    seed=st.integers(0, 10**6),
    prompts=st.integers(1, 12),
    size=st.integers(1, 5),
    open_rounds=st.integers(1, 4),
    chance_of_death=st.sampled_from([0.0, 0.1, 0.4]),
)
def test_every_group_is_stored_once_though_others_overtake_it_and_searchers_die(
    seed: int, prompts: int, size: int, open_rounds: int, chance_of_death: float
):
    """A searcher that dies loses everything it has not stored. The next one sees only the newest shards."""
    chance, asks = Random(seed), config(prompts=size, open_rounds=open_rounds)
    shards: list[list[Asked]] = []
    rounds, asked = Rounds(stream(prompts), asks), list[Group]()
    while len(shards) < 40:
        while rounds.have_room:
            number = rounds.next
            asked += (groups := rounds.take())
            assert groups and {it.round for it in groups} == {number}
        assert max(it.round for it in asked) - min(it.round for it in asked) < open_rounds
        chance.shuffle(asked)
        ended, asked = asked[:size], asked[size:]
        shards.append(asked_for(ended))
        rounds.store(ended)
        if chance.random() < chance_of_death:
            newest = shards[-SHARDS_PER_ROUND * open_rounds :]
            rounds, asked = Rounds(stream(prompts), asks, stored=[it for shard in newest for it in shard]), []
    stored = Counter(it for shard in shards for it in shard)
    assert set(stored.values()) == {1}
    before = min([it.round for it in asked], default=rounds.next)
    assert before > 40 / open_rounds - 2 * open_rounds, "it gets on"
    for round in range(before):
        assert {it for it in stored if it.round == round} == {*asked_for(rounds.groups(round))}


def test_a_round_that_other_settings_asked_is_left_as_it_is_and_the_next_one_begins():
    """This happens in a fork. No slot of the round is used twice, and no prompt gets the id of a stored group."""
    first = Rounds(stream(), config(prompts=3, responses=2))
    stored = asked_for(first.take()[:2])
    for changed in (config(prompts=4, responses=3), config(prompts=3, responses=4), config(prompts=1)):
        assert Rounds(stream(), changed, stored=stored).next == 1
    assert Rounds(stream(seed=8), config(), stored=stored).next == 1
    again = Rounds(stream(), config(prompts=3, responses=2, open_rounds=1), stored=stored)
    assert again.next == 0 and [it.number for it in again.take()] == [2] and not again.have_room


@pytest.mark.parametrize("first", [0, 5])
def test_where_a_shard_is_a_round_it_goes_on_with_the_first_that_is_not_stored(first: int):
    rounds = Rounds(stream(), config(open_rounds=1), first=first)
    assert rounds.next == first and rounds.have_room and len(rounds.take()) == 3 and not rounds.have_room
