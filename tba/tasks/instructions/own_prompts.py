"""Make our own prompts: a request with constraints. A prompt follows from its split, its number and the options alone.

The split `test` has topics and words of its own. Its prompts with several constraints have at least one pair of kinds
that no prompt of `train` has, or else a kind that only `test` has (`held_out_kinds`).
"""

import hashlib
from collections.abc import Iterable
from functools import cache
from itertools import combinations
from random import Random
from typing import NamedTuple

from tba.errors import ConfigError
from tba.tasks.instructions import topics
from tba.tasks.instructions.constraints import KINDS, Constraint, Draw, go_together

_HELD_OUT_SHARE = 5  # one pair of kinds in this many occurs only in `test`


class Instruction(NamedTuple):
    text: str
    constraints: tuple[Constraint, ...]


class Mixture(NamedTuple):
    """Which prompts are drawn. The fields are options of the task."""

    seed: int
    counts: tuple[int, ...]  # numbers of constraints; each is equally likely
    words: int
    kinds: tuple[str, ...]
    held_out_kinds: tuple[str, ...]

    def draw(self, split: str, number: int) -> Instruction:
        """Return a prompt of a split. Prompts have different requests until all requests of the split are used."""
        requests = _requests(self.seed, split)
        request = requests[number % len(requests)]
        rng = Random(f"instructions {self.seed} {split} {number}")
        kinds = list(rng.choice(self.combinations(split, rng.choice(self.counts))))
        rng.shuffle(kinds)
        kinds.sort(key=_comes_last)
        worded = [KINDS[kind](Draw(rng, split, request, self.words)) for kind in kinds]
        constraints = tuple(Constraint(kind, arguments) for kind, (arguments, _) in zip(kinds, worded, strict=True))
        return Instruction(" ".join([request, *(stated for _, stated in worded)]), constraints)

    def combinations(self, split: str, count: int) -> tuple[tuple[str, ...], ...]:
        """Return the combinations of kinds that prompts of a split with so many constraints may have. Raise ConfigError
        if there are none."""
        if found := _combinations(self.kinds, self.held_out_kinds, split, count):
            return found
        raise ConfigError(
            f"task.options.constraints: no {count} of the kinds of constraints go together in a prompt of split "
            f"{split!r}: name more kinds in task.options.kinds, or choose fewer constraints"
        )


@cache
def _combinations(
    kinds: tuple[str, ...], held_out_kinds: tuple[str, ...], split: str, count: int
) -> tuple[tuple[str, ...], ...]:
    held_out = held_out_pairs(kinds)

    def belongs(combination: tuple[str, ...]) -> bool:
        has_kind = not set(combination).isdisjoint(held_out_kinds)
        has_pair = not held_out.isdisjoint(combinations(combination, 2))
        if split == "train":
            return not has_kind and not has_pair
        return has_kind if held_out_kinds else has_pair or count == 1 or not held_out

    return tuple(
        combination
        for combination in combinations(sorted(kinds), count)
        if all(go_together(*pair) for pair in combinations(combination, 2)) and belongs(combination)
    )


def held_out_pairs(kinds: Iterable[str]) -> frozenset[tuple[str, str]]:
    """Return the pairs of kinds that occur only in the split `test`. The digest of a pair decides."""
    pairs = [pair for pair in combinations(sorted(kinds), 2) if go_together(*pair)]
    pairs.sort(key=lambda pair: hashlib.sha256(" ".join(pair).encode()).digest())
    return frozenset(pairs[: len(pairs) // _HELD_OUT_SHARE])


@cache
def _requests(seed: int, split: str) -> tuple[str, ...]:
    """Return every request of a split, in an order that the seed decides."""
    subjects = [topic for theme in topics.TOPICS.values() for topic in topics.part(split, theme)]
    requests = [form.format(topic=topic) for topic in subjects for form in topics.FORMS]
    Random(f"instructions {seed} {split}").shuffle(requests)
    return tuple(requests)


def _comes_last(kind: str) -> tuple[bool, bool]:
    """Order constraints as they are stated: the request to repeat stands right before its constraint, and what ends a
    response is said at the end."""
    return kind != "combination:repeat_prompt", kind.startswith("startend") or kind.endswith("postscript")
