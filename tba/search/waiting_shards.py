"""Shards that are whole, and wait until the versions of their responses are stored.

A version may reach searchers before the store has it (`sync.transport`). A log must not have trajectories of a version
that is not stored, so a shard is appended only once its versions are stored. Meanwhile the searcher goes on with
further rounds.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence

from tba.errors import RunFailed
from tba.interfaces import VersionStore
from tba.types import Trajectory, Version

MOST = 8
"""Shards that may wait. With so many, the searcher begins no further round."""

_EVERY, _IDLE = 1.0, 0.05  # seconds between two looks while the searcher generates, and while it has nothing to do


class WaitingShards:
    """Hands the shards out in the order in which they were added. `deadline` is the longest wait for a version, in
    seconds; `tell` hears what is waited for."""

    def __init__(self, versions: VersionStore, *, deadline: float, tell: Callable[[str], None]):
        self.versions, self.deadline, self.tell = versions, deadline, tell
        self._shards = deque[Sequence[Trajectory]]()
        self._since = 0.0  # when the wait for the oldest shard began
        self._looked = -math.inf  # time of the last look that found a version missing

    def __len__(self) -> int:
        return len(self._shards)

    @property
    def are_many(self) -> bool:
        return len(self._shards) >= MOST

    def add(self, trajectories: Sequence[Trajectory]) -> None:
        if not self._shards:
            self._since = time.monotonic()
        self._shards.append(trajectories)

    def pop(self, *, idle: bool) -> Sequence[Trajectory] | None:
        """Return the oldest shard if its versions are stored. Otherwise return None, after a short sleep if the
        searcher is idle."""
        if not self._shards:
            return None
        now = time.monotonic()
        if now - self._looked >= (_IDLE if idle else _EVERY):
            if not (missing := self._missing(self._shards[0])):
                self._since, self._looked = now, -math.inf
                return self._shards.popleft()
            if now - self._since >= self.deadline:
                raise RunFailed(
                    f"version {missing}, with which responses were generated, has not been stored for "
                    f"{self.deadline:g} s (limits.data_deadline)"
                )
            self._looked = now
            if idle:
                self.tell(f"waiting {now - self._since:.0f} s until version {missing} is stored")
        if idle:
            time.sleep(_IDLE)
        return None

    def _missing(self, shard: Sequence[Trajectory]) -> Version | None:
        """Return a version of these trajectories that is not stored; None if all are."""
        versions = {it for row in shard for it in (row.version_start, row.version_end)}
        return next((it for it in sorted(versions, key=lambda it: it.order) if not self.versions.is_stored(it)), None)
