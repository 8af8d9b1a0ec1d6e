"""Count the progress of a searcher, and report it through the searcher's lease."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

from tba.interfaces import Lease
from tba.runtime.waiting import timed
from tba.types import Trajectory, Version


class Progress:
    """Counts rounds, shards, trajectories, tokens and seconds of one searcher. `check` raises the errors of
    `Lease.check`, such as Stopped."""

    def __init__(self, lease: Lease):
        self.lease = lease
        self.round = 0  # the newest round with a stored group
        self.shards = 0  # number of stored shards, and so the sequence number of the next one
        self.trajectories = 0
        self.tokens = 0
        self.version: Version | None = None  # the version in use
        self.seconds: dict[str, float] = {}

    def check(self) -> None:
        self.lease.check()

    def tell(self, status: str) -> None:
        self.lease.tell(status, **self.numbers())

    def timed(self, part: str) -> AbstractContextManager[None]:
        """Return a context that adds the seconds spent inside it to the seconds of an activity, such as "generate"."""
        return timed(self.seconds, part)

    def add_shard(self, trajectories: Sequence[Trajectory]) -> None:
        self.shards += 1
        self.trajectories += len(trajectories)
        self.tokens += sum(t.length for t in trajectories)
        self.round = max(self.round, *(t.round for t in trajectories))
        self.tell(f"round {self.round} with version {self.version}")

    def numbers(self) -> dict[str, float]:
        return {
            "round": self.round,
            "shards": self.shards,
            "trajectories": self.trajectories,
            "tokens": self.tokens,
            **({"version": self.version.number} if self.version else {}),
            **{f"seconds_{part}": seconds for part, seconds in self.seconds.items()},
        }
