from collections import Counter

import pytest

from benchmarks.harness import fakes
from tba.search.prompt_stream import PromptStream
from tba.seeds import request_seed


def stream(n: int = 12, *, searcher: int = 0, searchers: int = 1, shuffle: bool = True) -> PromptStream:
    prompts = fakes.make_prompts(n)
    return PromptStream(prompts, seed=7, searcher=searcher, searchers=searchers, shuffle=shuffle)


def ids(stream: PromptStream, rounds: range, size: int) -> list[str]:
    return [p.prompt_id for round in rounds for p in stream.take(round, size)]


@pytest.mark.parametrize("searchers", [1, 3])
def test_together_searchers_visit_every_prompt_once_in_each_permutation(searchers):
    visits = Counter(
        prompt
        for i in range(searchers)
        for prompt in ids(stream(searcher=i, searchers=searchers), range(6), 12 // searchers // 2)
    )
    assert set(visits.values()) == {3} and len(visits) == 12


@pytest.mark.parametrize("shuffle", [True, False])
def test_searchers_that_join_share_a_sequence_of_their_own_and_change_nobodys(shuffle):
    joined = [ids(stream(searcher=3 + i, searchers=3, shuffle=shuffle), range(6), 4) for i in range(3)]
    assert Counter(prompt for lane in joined for prompt in lane) == {f"p{i}": 6 for i in range(12)}
    for i in range(3):
        assert joined[i][:4] != ids(stream(searcher=i, searchers=3, shuffle=shuffle), range(1), 4)


def test_a_searcher_that_leaves_starves_no_prompt():
    staying = [ids(stream(searcher=i, searchers=3), range(60), 4) for i in (0, 2)]
    visits = Counter(prompt for lane in staying for prompt in lane)
    assert set(visits) == {f"p{i}" for i in range(12)}
    assert min(visits.values()) > 20  # of 40 on average


def test_a_restarted_searcher_takes_the_same_prompts():
    first, rest = ids(stream(), range(4), 5), ids(stream(), range(4, 9), 5)
    assert ids(stream(), range(9), 5) == first + rest


def test_permutations_differ_in_order_unless_shuffling_is_off():
    shuffled, plain = ids(stream(), range(2), 12), ids(stream(shuffle=False), range(2), 12)
    assert shuffled[:12] != shuffled[12:] and sorted(shuffled[:12]) == sorted(shuffled[12:])
    assert plain == [f"p{i}" for i in range(12)] * 2


def test_a_round_never_asks_for_more_prompts_than_there_are():
    assert len(stream(3).take(0, 8)) == 3


def test_request_seeds_do_not_repeat_and_fit_a_signed_column():
    seeds = {request_seed(0, s, r, i) for s in range(3) for r in range(10) for i in range(50)}
    assert len(seeds) == 1500 and max(seeds) < 2**63


@pytest.mark.parametrize(("prompts", "searchers"), [(12, 1), (12, 3), (5, 4), (1, 2)])
def test_no_prompt_is_twice_in_a_round_also_where_permutations_meet(prompts, searchers):
    for searcher in range(searchers):
        for round in range(30):
            taken = ids(stream(prompts, searcher=searcher, searchers=searchers), range(round, round + 1), 5)
            assert 1 <= len(taken) == len(set(taken)) <= 5
