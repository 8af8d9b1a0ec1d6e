"""Estimate how long a trainer needs to stop, from its own measurements.

A trainer that is asked to stop takes at most the steps until the next sync, and then stores the ledger, the version and
the checkpoint of that sync.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from tba.config import Config

RECENT_STEPS, RECENT_SYNCS = 50, 5
CHECKPOINT = 4.0
"""Until a checkpoint has been measured, it is assumed to take this many times as long as a version that is published in
full precision: each weight has two moments, and the fourth part is a margin."""
_BYTES = {"float32": 4, "bfloat16": 2}


class Longest:
    """The longest of the last `last` measurements, in seconds."""

    def __init__(self, last: int):
        self._seconds: deque[float] = deque(maxlen=last)

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)

    def __bool__(self) -> bool:
        return bool(self._seconds)

    @property
    def seconds(self) -> float:
        return max(list(self._seconds), default=0.0)


class StoreTimes:
    """How long the ledger, version and checkpoint of recent syncs took to store. The threads that store them measure
    the time."""

    def __init__(self, to_version: float = CHECKPOINT) -> None:
        self.to_version = to_version  # time of a checkpoint, relative to a version, until one has been measured
        self.ledger, self.version, self.checkpoint = (Longest(RECENT_SYNCS) for _ in range(3))

    @property
    def seconds(self) -> float:
        """How long a trainer that stops may need to store its last sync, which always has a checkpoint."""
        checkpoint = self.checkpoint.seconds if self.checkpoint else self.to_version * self.version.seconds
        return self.ledger.seconds + self.version.seconds + checkpoint


def checkpoint_to_version(config: Config) -> float:
    """Return how many times as long a checkpoint is assumed to take as a version, which may be in a smaller dtype."""
    return CHECKPOINT * _BYTES[config.model.dtype] / _BYTES[config.model.publish_dtype]


def steps_to_stop(config: Config, step: int, *, is_stopping: bool) -> int:
    """Return how many more steps a trainer takes after step `step` at most if it is asked to stop: the steps up to the
    next sync. A request that comes during a step is noticed only after that step. A trainer that may have to wait for
    searchers ends at a sync that it has just closed, without a further step."""
    heard = min(step + (1 if is_stopping or config.awaits_searchers else 2), config.training.steps)
    return max(0, config.step_of_sync(config.sync_of_step(heard)) - step)


@contextmanager
def measured(longest: Longest) -> Iterator[None]:
    """Add the seconds that the `with` block takes, unless the block raises an error."""
    began = time.monotonic()
    yield
    longest.add(time.monotonic() - began)
