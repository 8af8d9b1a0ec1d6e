"""The unfinished work of a searcher: requests in flight, and finished groups that wait for a shard."""

from collections.abc import Mapping

from tba.interfaces import InFlight
from tba.search.open_rounds import Group
from tba.types import Request


class GroupsInFlight:
    """Submits requests to the generator (`answers`), and collects the responses by group. A shard has `shard_size`
    finished groups, or fewer once no request is in flight."""

    def __init__(self, answers: InFlight, *, shard_size: int):
        self.answers, self.shard_size = answers, shard_size
        self.requests: dict[Request, tuple[Group, int]] = {}  # in flight, each with its group and slot
        self.ended: list[Group] = []  # finished groups in no shard yet, in the order in which they finished

    def __len__(self) -> int:
        """Return the number of requests in flight."""
        return len(self.requests)

    def ask(self, requests: Mapping[Request, tuple[Group, int]]) -> None:
        self.answers.submit(list(requests))
        self.requests |= requests

    def step(self) -> None:
        """Generate for a moment, and add each response that finished in this call to its group."""
        for request, response in self.answers.step():
            group, slot = self.requests.pop(request)
            group.ended[slot] = response
            if group.is_whole:
                self.ended.append(group)

    def next_shard(self) -> list[Group]:
        """Return the groups of the next shard, sorted by round and position. They are the groups that finished first.
        Return an empty list if too few groups have finished for a shard."""
        if self.requests and len(self.ended) < self.shard_size:
            return []
        groups, self.ended = self.ended[: self.shard_size], self.ended[self.shard_size :]
        return sorted(groups, key=lambda group: (group.round, group.number))
