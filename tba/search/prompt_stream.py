"""Which prompts a round visits, and the seed of each response, turn and continuation: functions of settings and place,
so that whoever starts again does the same."""

import hashlib
from collections.abc import Sequence

from tba.types import Prompt


class PromptStream:
    """Which prompts a round visits: a function of seed, searcher and round alone, so a restart changes nothing.

    The N searchers of the settings walk one endless sequence of seeded permutations of the prompts; searcher i takes
    every N-th place of it, so that together they visit each prompt once per permutation. The next N that join share
    another such sequence, and so on: whoever comes or goes changes nobody's prompts, and what one leaves undone is
    dealt anew in the next permutation. A round that reaches into the next one leaves out what it has already: the
    responses of a prompt in a round are one group.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, searcher: int, searchers: int, shuffle: bool):
        self.prompts, self.seed, self.shuffle = prompts, seed, shuffle
        self.sequence, self.searcher = divmod(searcher, searchers)
        self.searchers = searchers
        self.orders: dict[int, list[int]] = {}  # of the permutations in use, by number

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
        if not self.shuffle:  # each sequence begins elsewhere
            first = len(indices) * self.sequence // (self.sequence + 1)
            return indices[first:] + indices[:first]
        name = f"{self.seed}:prompts:{number}" + (f":{self.sequence}" if self.sequence else "")
        return sorted(indices, key=lambda i: hashlib.md5(f"{name}:{i}".encode()).digest())
