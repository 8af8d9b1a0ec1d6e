"""Steps that were taken, taken again: the same records, draws and trajectories, from a state that was kept."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tba.interfaces import ReplayBuffer
from tba.learner import Learned, Learner
from tba.types import Draw


@dataclass(frozen=True, kw_only=True)
class Retaken:
    step: int
    draws: Sequence[Draw]
    learned: Learned


def retake(learner: Learner, buffer: ReplayBuffer, *, after: int, upto: int) -> Iterator[Retaken]:
    """Each step after `after`, whose state learner and buffer hold, up to `upto`; they hold the state after a step when
    it comes out."""
    for step in range(after + 1, upto + 1):
        buffer.replay(learner.config.sync_before(step))
        draws = buffer.draw(step)
        learned = learner.learn(step, learner.collate(buffer.fetch(draws)))
        yield Retaken(step=step, draws=draws, learned=learned)
