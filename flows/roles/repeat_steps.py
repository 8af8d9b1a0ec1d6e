"""Restore the trainer's state after a past step, and repeat gradient steps from there. `tba audit` and `tba fork` use
this. The module imports torch."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from transformers.utils import logging as transformers_logging

from flows.roles import model_loading
from flows.roles.buffer_process import make_buffer
from flows.roles.number_format import arithmetic_of
from storage.buffer.replay_buffer import DuckReplayBuffer
from storage.local_files.scratch import scratch_folder
from storage.runs.arithmetic import Arithmetic
from storage.runs.attempts import Span, accepts, chain
from storage.runs.events import Events
from storage.runs.rendezvous import most_ranks
from storage.runs.retention import in_the_way, lost_for
from storage.runs.run import Run
from storage.weights import lost_checkpoints
from storage.weights.checkpoints import Checkpoints
from tba.batches.batching import batch_metrics
from tba.config import Config, parse
from tba.errors import ConfigError, Damaged
from tba.train.learner import Learned, Learner
from tba.train.training_state import TrainingState
from tba.types import Draw, Metrics, Version

log = logging.getLogger(__name__)

transformers_logging.disable_progress_bar()  # its bars show loading, not the steps that are repeated


@dataclass(frozen=True, kw_only=True)
class RepeatedStep:
    """The result of repeating a step with the same sync records, draws and trajectories as the first time."""

    step: int
    draws: Sequence[Draw]
    learned: Learned
    metrics: Metrics  # those of the batch and those of the gradient step


class RestoredTrainer:
    """The trainer in its state after step `step`: policy, optimizer and replay buffer. `ranks` is the largest number of
    ranks with which steps may have been taken."""

    def __init__(self, step: int, learner: Learner, buffer: DuckReplayBuffer, *, ranks: int):
        self.step, self.learner, self.buffer, self.ranks = step, learner, buffer, ranks

    @property
    def device(self) -> str:
        return self.learner.policy.device.type

    @property
    def arithmetic(self) -> Arithmetic:
        return arithmetic_of(self.learner.config, self.learner.policy)

    @property
    def repeatable(self) -> bool:
        """True if repeating a step on the same kind of machine gives bitwise equal weights. GPUs do not promise this,
        and sums over several ranks can differ in their last digits."""
        return self.device == "cpu" and self.ranks == 1

    def weights_sha256(self, like: str | None) -> str:
        """Return the digest of the weights that has the kind of a stored digest."""
        return self.learner.policy.snapshot().digest_like(like)

    def repeat_until(self, upto: int) -> Iterator[RepeatedStep]:
        """Repeat the steps up to and including `upto`. Yield each step once the learner and the buffer hold the state
        after it."""
        for step in range(self.step + 1, upto + 1):
            self.buffer.replay(self.learner.config.sync_before(step))
            draws = self.buffer.draw(step)
            batch = self.learner.collate(self.buffer.fetch(draws))
            learned = self.learner.learn(step, batch)
            self.step = step
            metrics = {**learned.metrics, **batch_metrics(draws, batch)}
            yield RepeatedStep(step=step, draws=draws, learned=learned, metrics=metrics)

    def save(self, run: Run, attempt: int) -> None:
        """Store this state as a checkpoint of a run. The current step must be one after which a sync took place."""
        sync = self.learner.config.sync_of_step(self.step)
        self.buffer.replay(sync)
        state = replace(self.learner.state(step=self.step, sync=sync), queues=self.buffer.queues())
        with scratch_folder() as folder:
            sha256s = self.learner.policy.snapshot().save(folder).sha256s | state.save(folder)
            Checkpoints(run).save(sync, attempt, step=self.step, folder=folder, sha256s=sha256s)


def restore_trainer(run: Run, before: int) -> RestoredTrainer:
    """Return the trainer in its newest stored state from before step `before`: that of the newest intact checkpoint, or
    else the policy before training. A fork that starts from a checkpoint never falls back to the policy before
    training: raise Damaged if none of its checkpoints is intact. Raise ConfigError if the steps after that state, up to
    `before`, may need data that a retention record has given up."""
    config, spans = parse(run.config), chain(run)
    kept = [it for it in Checkpoints(run).complete() if accepts(spans, it) and it.number >= config.start.sync]
    usable = [it for it in kept if config.step_of_sync(it.number) < before]
    damaged: dict[Version, Damaged] = {}
    for checkpoint in sorted(usable, reverse=True):
        _check_buffers(run, config, spans, checkpoint.number, before)
        _check_drawable(run, config, checkpoint.number, before, kept, damaged)
        try:
            policy, state = model_loading.load_checkpoint(run, config, checkpoint)
        except Damaged as error:
            log.warning("%s: checkpoint %s is damaged, trying an older one: %s", run.name, checkpoint, error)
            damaged[checkpoint] = error
        else:
            return _after(run, config, spans[-1].attempt, Learner(config, policy), state)
    if config.start.sync:
        raise lost_checkpoints.none_intact(run, damaged) if damaged else lost_checkpoints.no_start(run)
    _check_buffers(run, config, spans, 0, before)
    _check_drawable(run, config, 0, before, kept, damaged)
    return _after(run, config, spans[-1].attempt, Learner(config, model_loading.load_start(run, config)), None)


def _after(run: Run, config: Config, attempt: int, learner: Learner, state: TrainingState | None) -> RestoredTrainer:
    """Return the trainer with the state of a checkpoint, or as it was before the first step if `state` is None."""
    buffer = make_buffer(run, config, attempt, Events(run, "past", 0))  # a replay writes no events
    ranks = max(config.training.ranks, most_ranks(run))
    if state is None:
        return RestoredTrainer(0, learner, buffer, ranks=ranks)
    learner.restore(state)
    buffer.replay(state.sync)
    buffer.restore(state.queues)
    return RestoredTrainer(state.step, learner, buffer, ranks=ranks)


def _check_buffers(run: Run, config: Config, spans: Sequence[Span], start: int, before: int) -> None:
    """Raise ConfigError if, at any step after sync `start` and up to `before`, the buffer held shards that a retention
    record has given up since. Repeating this step, or any later one, would draw other trajectories."""
    last = config.sync_of_step(before)
    for span in spans:
        newest = last if span.last_sync is None else min(last, span.last_sync)
        if newest <= start or newest < span.first_sync:
            continue  # this attempt took none of these steps
        if lost := lost_for(run, newest - 1, span.attempt):
            subject = f"step {before} of {run.name}"
            if newest < last:
                subject += f" follows step {config.step_of_sync(newest)}, which"
            raise ConfigError(
                f"--step: {subject} was taken while the buffer held shards that {lost} gave up: it cannot be repeated"
            )


def _check_drawable(
    run: Run, config: Config, start: int, before: int, kept: Sequence[Version], damaged: Mapping[Version, Damaged]
) -> None:
    """Raise ConfigError if the steps after sync `start`, up to step `before`, may draw trajectories whose tokens a
    retention record has given up. `kept` and `damaged` are checkpoints; the error names a step that can be repeated."""
    if gone := in_the_way(run, start, config.sync_before(before)):
        later = [it for it in kept if it.number >= gone.payloads.last_sync and it not in damaged]
        first = min((config.step_of_sync(it.number) for it in later), default=gone.payloads.step) + 1
        passed = "".join(f"; checkpoint {it} is damaged: {error}" for it, error in damaged.items())
        raise ConfigError(
            f"--step: the steps of {run.name} after step {config.step_of_sync(start)} drew tokens that {gone} gave up; "
            f"steps can be repeated from step {first} on{passed}"
        )
