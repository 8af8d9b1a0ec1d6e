"""The groups of a searcher in the making: requests in flight, and groups that have ended and wait for a shard."""

from collections.abc import Mapping

from tba.interfaces import InFlight
from tba.search.rounds import Group
from tba.types import Request


class GroupsInFlight:
    """Passes requests on to `answers`, and gathers the responses by group. A shard has `shard_size` groups, or fewer
    if nothing is in flight any more."""

    def __init__(self, answers: InFlight, *, shard_size: int):
        self.answers, self.shard_size = answers, shard_size
        self.requests: dict[Request, tuple[Group, int]] = {}  # in flight, with group and slot of the response
        self.ended: list[Group] = []  # in no shard yet, in the order in which they ended

    def __len__(self) -> int:
        """Return the number of requests in flight."""
        return len(self.requests)

    def ask(self, requests: Mapping[Request, tuple[Group, int]]) -> None:
        self.answers.submit(list(requests))
        self.requests |= requests

    def step(self) -> None:
        """Generate for a moment, and take in the responses that have ended."""
        for request, response in self.answers.step():
            group, slot = self.requests.pop(request)
            group.ended[slot] = response
            if group.is_whole:
                self.ended.append(group)

    def next_shard(self) -> list[Group]:
        """Return the groups that ended first, in the order of their rounds; none if they do not fill a shard yet."""
        if self.requests and len(self.ended) < self.shard_size:
            return []
        groups, self.ended = self.ended[: self.shard_size], self.ended[self.shard_size :]
        return sorted(groups, key=lambda group: (group.round, group.number))
