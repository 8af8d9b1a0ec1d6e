"""The problems of quickstart: prompts, answers, and demonstrations, many of which are wrong."""

import random
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

TRAIN_PROMPTS, TEST_PROMPTS = 4096, 1000
WRONG = 0.5  # share of demonstrations with one or two wrong digits
_LEAST, _MOST = 100, 999


class Problem(NamedTuple):
    left: int
    right: int

    @property
    def prompt(self) -> str:
        return f"{units_first(self.left)}+{units_first(self.right)}="

    @property
    def answer(self) -> str:
        return units_first(self.left + self.right)


@cache
def problems(split: str) -> tuple[Problem, ...]:
    """Return the problems of a split. Both splits are parts of one seeded sample without replacement, so they share no
    problem."""
    span = _MOST - _LEAST + 1
    drawn = random.Random("quickstart").sample(range(span * span), TEST_PROMPTS + TRAIN_PROMPTS)
    of_split = {"test": drawn[:TEST_PROMPTS], "train": drawn[TEST_PROMPTS:]}[split]
    return tuple(Problem(_LEAST + number // span, _LEAST + number % span) for number in of_split)


def demonstrations(seed: int) -> Iterator[tuple[str, str]]:
    """Yield endless pairs of a prompt and a response. A random half of the responses has one or two wrong digits."""
    rng = random.Random(f"quickstart:{seed}")
    held_out = frozenset(problems("test"))
    while True:
        problem = Problem(rng.randint(_LEAST, _MOST), rng.randint(_LEAST, _MOST))
        if problem not in held_out:
            yield problem.prompt, with_wrong_digits(problem.answer, rng) if rng.random() < WRONG else problem.answer


def with_wrong_digits(answer: str, rng: random.Random) -> str:
    digits = list(answer)
    for place in rng.sample(range(len(digits)), rng.choice([1, 2])):
        digits[place] = rng.choice([digit for digit in "0123456789" if digit != digits[place]])
    return "".join(digits)


def units_first(number: int) -> str:
    return str(number)[::-1]
