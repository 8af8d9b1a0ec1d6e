"""Shards that are whole, and wait until the versions of their responses are stored.

A version may reach searchers before the store has it (`sync.transport`). Trajectories in the log then come after their
versions all the same, so a shard is appended only once its versions are stored. Meanwhile the searcher goes on with the
next rounds."""

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from tba.errors import DeadlinePassed
from tba.interfaces import VersionStore
from tba.types import Trajectory, Version

_EVERY, _IDLE = 1.0, 0.02  # seconds between two looks while the searcher generates, and while it has nothing to do


class _Shard(NamedTuple):
    trajectories: Sequence[Trajectory]
    since: float

    @property
    def versions(self) -> list[Version]:
        both = {it for row in self.trajectories for it in (row.version_start, row.version_end)}
        return sorted(both, key=lambda version: version.order)


class WaitingShards:
    """Hands the shards out in the order in which they were added. `deadline` is the longest wait in seconds."""

    def __init__(self, versions: VersionStore, *, deadline: float):
        self.versions, self.deadline = versions, deadline
        self._shards = deque[_Shard]()
        self._look_at = 0.0  # time of the next look, after one that has found a version missing

    def __len__(self) -> int:
        return len(self._shards)

    def add(self, trajectories: Sequence[Trajectory]) -> None:
        self._shards.append(_Shard(trajectories, time.monotonic()))

    def pop(self, *, idle: bool) -> Sequence[Trajectory] | None:
        """Return the oldest shard if its versions are stored. If none is, return None, after a short sleep if the
        searcher is idle."""
        if not self._shards:
            return None
        oldest, now = self._shards[0], time.monotonic()
        if now >= self._look_at:
            missing = [it for it in oldest.versions if not self.versions.is_stored(it)]
            if not missing:
                return self._shards.popleft().trajectories
            if now - oldest.since >= self.deadline:
                raise DeadlinePassed(
                    f"version {missing[0]}, with which responses were generated, has not been stored for "
                    f"{self.deadline:g} s (limits.data_deadline)"
                )
            self._look_at = now + (_IDLE if idle else _EVERY)
        if idle:
            time.sleep(_IDLE)
        return None
