from collections import Counter
from functools import partial

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from storage.buffer.prompt_queue import Queue
from tests.support.storage.chance import agree
from tests.support.storage.oracle import u


def make_queue(prompts: int) -> Queue:
    queue = Queue()
    queue.add(np.arange(prompts))
    return queue


def test_a_prompt_that_joins_is_as_likely_next_as_those_that_wait():
    found = Counter()
    for seed in range(2000):
        queue = make_queue(6)
        taken = queue.turns(3, partial(u, seed, "before"))
        queue.mark_used(taken)
        queue.add(np.array([6, 7]))
        waiting = [prompt for prompt in range(8) if prompt not in taken]
        [prompt] = queue.turns(1, partial(u, seed, "after"))
        found[waiting.index(prompt)] += 1
    assert agree(found, dict.fromkeys(range(5), 1 / 5))


@given(prompts=st.integers(1, 40), slots=st.integers(1, 99), seed=st.integers(0, 99), used=st.integers(0, 60))
def test_turns_use_all_before_any_is_used_again(prompts: int, slots: int, seed: int, used: int):
    queue = make_queue(prompts)
    queue.mark_used(queue.turns(used, partial(u, seed)))
    before = queue.prompts_P[queue.used_P].tolist()
    taken = queue.turns(slots, partial(u, seed, "more"))
    left = (prompts - len(before)) or prompts
    assert not len(before) < prompts or not set(taken[:left]) & set(before)
    assert all(count == 1 for count in Counter(taken[:left]).values())
    for start in range(left, slots - prompts + 1, prompts):
        assert sorted(taken[start : start + prompts]) == list(range(prompts))


@given(prompts=st.integers(0, 40), used=st.integers(0, 60))
def test_a_restored_queue_takes_the_same_turns(prompts: int, used: int):
    queue, again = make_queue(prompts), make_queue(prompts)
    queue.mark_used(queue.turns(used, u))
    again.restore(queue.state())
    assert again.state() == queue.state()
    assert again.turns(50, partial(u, "more")) == queue.turns(50, partial(u, "more"))


def test_looking_ahead_takes_nothing():
    queue = make_queue(5)
    before = queue.state()
    assert queue.turns(7, u) == queue.turns(7, u)
    assert queue.state() == before
