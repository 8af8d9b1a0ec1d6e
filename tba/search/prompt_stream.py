"""The order in which searchers visit the prompts. The order depends only on the settings, so that a restarted searcher
visits the same prompts."""

import hashlib
from collections.abc import Sequence

from tba.types import Prompt


class PromptStream:
    """Chooses the prompts of a round. The choice depends only on the seed, the searcher and the round, so that a
    restart does not change it.

    The N searchers of the settings share one endless sequence of seeded permutations of the prompts. Searcher i takes
    every N-th place of the sequence, so together they visit each prompt once per permutation. The next N searchers that
    join share another sequence, and so on: a searcher that joins or leaves changes the prompts of no other searcher,
    and the prompts that it leaves unvisited come again in the next permutation. A round that spans two permutations
    drops repeated prompts, because all responses to a prompt in a round are one group.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, searcher: int, searchers: int, shuffle: bool):
        self.prompts, self.seed, self.shuffle = prompts, seed, shuffle
        self.sequence, self.searcher = divmod(searcher, searchers)
        self.searchers = searchers
        self.orders: dict[int, list[int]] = {}  # the permutations in use, by number

    def take(self, round: int, size: int) -> list[Prompt]:
        size = min(size, len(self.prompts))
        places = range(round * size, (round + 1) * size)
        chosen = dict.fromkeys(self._at(place * self.searchers + self.searcher) for place in places)
        return [self.prompts[index] for index in chosen]

    def _at(self, place: int) -> int:
        number, offset = divmod(place, len(self.prompts))
        if number not in self.orders:
            self.orders = {n: order for n, order in self.orders.items() if n >= number - 1}
            self.orders[number] = self._order(number)
        return self.orders[number][offset]

    def _order(self, number: int) -> list[int]:
        indices = list(range(len(self.prompts)))
        if not self.shuffle:  # each sequence starts at another prompt
            first = len(indices) * self.sequence // (self.sequence + 1)
            return indices[first:] + indices[:first]
        name = f"{self.seed}:prompts:{number}" + (f":{self.sequence}" if self.sequence else "")
        return sorted(indices, key=lambda i: hashlib.md5(f"{name}:{i}".encode()).digest())
