"""The open rounds of a searcher: rounds that have been requested but are not stored completely yet."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tba.config import SearchConfig
from tba.interfaces import TrajectoryLog
from tba.search.prompt_stream import PromptStream
from tba.types import Asked, Prompt, Response

SHARDS_PER_ROUND = 4
"""Number of newest shards that a restarted searcher reads, for each of the `search.open_rounds` rounds that may be
open. Since the oldest open round was requested, the searcher stored at most two full shards per open round, and at most
as many shards with fewer groups."""


@dataclass(kw_only=True, eq=False)
class Group:
    """A prompt of a round, with the responses to it that have finished so far."""

    round: int
    number: int  # position of the group in its round
    prompt: Prompt
    size: int
    ended: dict[int, Response] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        return len(self.ended) == self.size

    @property
    def slots(self) -> range:
        return range(self.number * self.size, (self.number + 1) * self.size)

    @property
    def responses(self) -> list[Response]:
        return [self.ended[slot] for slot in self.slots]


class Rounds:
    """Hands out rounds in order. Of any `search.open_rounds` rounds in a row, the first must be stored before the round
    after them is handed out. So all rounds that a restarted searcher must request again are among the newest.

    `stored` lists the requests that the rows of the newest shards answer. If the prompts or slots of a round's rows are
    not those that the settings now give for this round, as in a fork with changed settings, nothing of this round is
    requested again.
    """

    def __init__(self, stream: PromptStream, config: SearchConfig, *, first: int = 0, stored: Iterable[Asked] = ()):
        self.stream, self.config = stream, config
        self.open: dict[int, set[int]] = {}  # numbers of the groups that are not stored yet, by round
        self._again: deque[list[Group]] = deque()
        rows: dict[int, list[Asked]] = {}
        for asked in stored:
            rows.setdefault(asked.round, []).append(asked)
        self._next = max(rows, default=first - 1) + 1
        begun = range(max(0, self._next - config.open_rounds), self._next) if rows else ()
        for round in begun:
            if missing := self._missing(round, rows.get(round, [])):
                self._again.append(self._opened(missing))

    @property
    def next(self) -> int:
        return self._again[0][0].round if self._again else self._next

    @property
    def have_room(self) -> bool:
        return bool(self._again) or self._next - min(self.open, default=self._next) < self.config.open_rounds

    def take(self) -> list[Group]:
        """Return the groups to request next: those of the next round, or those that are missing from a round that a
        restarted searcher had begun."""
        if self._again:
            return self._again.popleft()
        self._next += 1
        return self._opened(self.groups(self._next - 1))

    def store(self, groups: Iterable[Group]) -> None:
        for group in groups:
            self.open[group.round].remove(group.number)
            if not self.open[group.round]:
                del self.open[group.round]

    def groups(self, round: int) -> list[Group]:
        prompts = self.stream.take(round, self.config.prompts_per_round)
        size = self.config.responses_per_prompt
        return [Group(round=round, number=i, prompt=prompt, size=size) for i, prompt in enumerate(prompts)]

    def _opened(self, groups: list[Group]) -> list[Group]:
        self.open[groups[0].round] = {group.number for group in groups}
        return groups

    def _missing(self, round: int, stored: Sequence[Asked]) -> list[Group]:
        groups = self.groups(round)
        of_slot = {slot: group for group in groups for slot in group.slots}
        if any(row.slot not in of_slot or of_slot[row.slot].prompt.prompt_id != row.prompt_id for row in stored):
            return []
        done = {of_slot[row.slot].number for row in stored}
        return [group for group in groups if group.number not in done]


def newest_asked(log: TrajectoryLog, searcher: int, end: int, *, open_rounds: int) -> Sequence[Asked]:
    """Return the requests that the newest shards before sequence number `end` answer. If none of these shards can be
    read, try the shards before them, and so on."""
    each = SHARDS_PER_ROUND * open_rounds
    while end > 0:
        if asked := log.asked(searcher, range(max(0, end - each), end)):
            return asked
        end -= each
    return ()
