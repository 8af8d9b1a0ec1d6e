"""Steps that were taken, taken again: the same records, draws and trajectories, from a state that was kept."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tba.batches.batching import batch_metrics
from tba.interfaces import ReplayBuffer
from tba.train.learner import Learned, Learner
from tba.types import Draw, Metrics


@dataclass(frozen=True, kw_only=True)
class Retaken:
    step: int
    draws: Sequence[Draw]
    learned: Learned
    metrics: Metrics  # of the batch, and of what was learned from it


def retake(learner: Learner, buffer: ReplayBuffer, *, after: int, upto: int) -> Iterator[Retaken]:
    """Each step after `after`, whose state learner and buffer hold, up to `upto`; they hold the state after a step when
    it comes out."""
    for step in range(after + 1, upto + 1):
        buffer.replay(learner.config.sync_before(step))
        draws = buffer.draw(step)
        batch = learner.collate(buffer.fetch(draws))
        learned = learner.learn(step, batch)
        metrics = {**learned.metrics, **batch_metrics(draws, batch)}
        yield Retaken(step=step, draws=draws, learned=learned, metrics=metrics)
