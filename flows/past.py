"""A run as it was after a step, loaded from what it keeps, to take steps again. Needs torch."""

from collections.abc import Iterator
from dataclasses import replace

from transformers.utils import logging as transformers_logging

from flows import wiring
from flows.reader import make_buffer
from storage.attempts import accepts, chain
from storage.checkpoints import Checkpoints
from storage.events import Events
from storage.replay_buffer import DuckReplayBuffer
from storage.retention import in_the_way, lost_for
from storage.run import Run
from storage.scratch import scratch_folder
from tba.config import parse
from tba.errors import ConfigError, Damaged
from tba.learner import Learner
from tba.retake import Retaken, retake

transformers_logging.disable_progress_bar()  # its bars say nothing of the steps


class Past:
    """What the trainer held after step `step`."""

    def __init__(self, step: int, learner: Learner, buffer: DuckReplayBuffer):
        self.step, self.learner, self.buffer = step, learner, buffer

    @property
    def device(self) -> str:
        return self.learner.policy.device.type

    @property
    def repeatable(self) -> bool:
        """Whether the same step gives the same bits, on the same kind of machine: what several ranks added up comes
        out the same but for its last digits."""
        return self.device == "cpu" and self.learner.config.training.ranks == 1

    def weights_sha256(self) -> str:
        return self.learner.policy.snapshot().sha256

    def retake(self, upto: int) -> Iterator[Retaken]:
        """The steps up to this one, each as it is taken again."""
        for taken in retake(self.learner, self.buffer, after=self.step, upto=upto):
            self.step = taken.step
            yield taken

    def save(self, run: Run, attempt: int) -> None:
        """As a checkpoint of a run; it stands at a sync."""
        sync = self.learner.config.sync_of_step(self.step)
        self.buffer.replay(sync)
        state = replace(self.learner.state(step=self.step, sync=sync), queues=self.buffer.queues())
        with scratch_folder() as folder:
            self.learner.policy.snapshot().save(folder)
            state.save(folder)
            Checkpoints(run).save(sync, attempt, step=self.step, folder=folder)


def load_past(run: Run, before: int) -> Past:
    """The newest state before a step that a run keeps: a checkpoint, or else the start. A fork starts from a checkpoint
    that is always kept. ConfigError if what the step draws has been given up since."""
    config, spans = parse(run.config), chain(run)
    kept = [it for it in Checkpoints(run).complete() if accepts(spans, it) and it.number >= config.start.sync]
    usable = [it for it in kept if config.step_of_sync(it.number) < before]
    start = max(usable).number if usable else 0
    if gone := in_the_way(run, start, config.sync_before(before)):
        later = [config.step_of_sync(it.number) for it in kept if it.number >= gone.payloads.last_sync]
        raise ConfigError(
            f"--step: the steps of {run.name} after step {config.step_of_sync(start)} drew tokens that have been given "
            f"up, says {gone}; steps can be taken again from step {min(later, default=gone.payloads.step) + 1} on"
        )
    sync = config.sync_before(before)
    taken_by = next((span.attempt for span in spans if span.covers(config.sync_of_step(before))), spans[-1].attempt)
    if lost := lost_for(run, sync, taken_by):
        raise ConfigError(
            f"--step: step {before} of {run.name} was taken while the buffer held shards that {lost} gives up: "
            "it cannot be taken again"
        )
    buffer = make_buffer(run, config, spans[-1].attempt, Events(run, "past", 0))  # it will write nothing
    if not usable and config.start.sync:
        raise Damaged(f"{run.url} starts from the checkpoint of sync {config.start.sync}, which is gone")
    if not usable:
        return Past(0, Learner(config, wiring.load_start(run, config)), buffer)
    policy, state = wiring.load_checkpoint(run, config, max(usable))
    learner = Learner(config, policy)
    learner.restore(state)
    buffer.replay(state.sync)
    buffer.restore(state.queues)
    return Past(state.step, learner, buffer)
