"""Which rounds of a searcher are open: asked, and not all of their groups stored."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tba.config import SearchConfig
from tba.interfaces import TrajectoryLog
from tba.search.prompt_stream import PromptStream
from tba.types import Asked, Prompt, Response

SHARDS_PER_ROUND = 4
"""Number of the newest shards that are read for each round that may be open. While the newest rounds were asked, no
more than twice as many shards were stored: full ones, and at most as many that were cut short."""


@dataclass(kw_only=True, eq=False)
class Group:
    """A prompt of a round, and the responses to it as they end."""

    round: int
    number: int  # of the round's groups
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
    """Hands out rounds one after the other, no more than `search.open_rounds` of them in a row before the oldest is
    stored: so what a searcher that starts again has to ask again is among the newest.

    `stored` is what the rows of the newest shards answer. A round of which other prompts or slots are stored than would
    be asked today, as in a fork with other settings, stays as it is.
    """

    def __init__(self, stream: PromptStream, config: SearchConfig, *, first: int = 0, stored: Iterable[Asked] = ()):
        self.stream, self.config = stream, config
        self.open: dict[int, set[int]] = {}  # the numbers of the groups that are not stored, by round
        self._again: deque[list[Group]] = deque()
        rows: dict[int, list[Asked]] = {}
        for it in stored:
            rows.setdefault(it.round, []).append(it)
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
        """The groups of the next round that are to be asked."""
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
        if any(it.slot not in of_slot or of_slot[it.slot].prompt.prompt_id != it.prompt_id for it in stored):
            return []
        done = {of_slot[it.slot].number for it in stored}
        return [group for group in groups if group.number not in done]


def newest_asked(log: TrajectoryLog, searcher: int, end: int, *, open_rounds: int) -> Sequence[Asked]:
    """Return what the newest shards before shard `end` answer. If none of these can be read, return what the shards
    before them answer, and so on."""
    each = SHARDS_PER_ROUND * open_rounds
    while end > 0:
        if asked := log.asked(searcher, range(max(0, end - each), end)):
            return asked
        end -= each
    return ()
