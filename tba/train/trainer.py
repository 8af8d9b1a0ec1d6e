"""The trainer: it draws batches from the replay buffer, takes gradient steps on the loss, and syncs every k steps.

Its threads share only finished values:

    ahead    sync record n (once step n x k has begun) -> draw -> fetch -> collate (tba/train/batches_ahead.py)
    main     forward, backward, step; at each sync, a copy of the trainer
    syncing  ledger, version and checkpoint of sync n, from the copy; three threads (tba/train/sync_writer.py)

Order at a sync: sync record, ledger, checkpoint. After a crash between any two of them, the next attempt repeats the
steps since the newest checkpoint, with the same sync records.
"""

import time
from collections.abc import Mapping
from concurrent.futures import wait

from tba.alarms import Alarms
from tba.batches.batching import batch_metrics
from tba.config import Config
from tba.errors import RunFailed, Stopped
from tba.interfaces import EventLog, Lease, MetricLog, ReplayBuffer
from tba.runtime.shifts import NO_SHIFTS, Shift
from tba.runtime.waiting import timed
from tba.train.batches_ahead import BatchesAhead, Prepared
from tba.train.learner import Learned, Learner
from tba.train.learning_alarms import LearningAlarms
from tba.train.stop_time import RECENT_STEPS, Longest, steps_to_stop
from tba.train.sync_writer import Copy, SyncWriter
from tba.train.training_state import TrainingState
from tba.types import StepRecord, Version


class Trainer:
    def __init__(
        self,
        config: Config,
        *,
        learner: Learner,
        buffer: ReplayBuffer,
        syncs: SyncWriter,
        metrics: MetricLog,
        lease: Lease,
        events: EventLog,
        shift: Shift = NO_SHIFTS,
    ):
        self.shift = shift
        self.config, self.learner, self.syncs = config, learner, syncs
        self.metrics, self.lease, self.events = metrics, lease, events
        self.learning = LearningAlarms(config.alarms)
        self.alarms = Alarms(events.write, patience=config.alarms.window)
        self.ahead = BatchesAhead(config, learner=learner, buffer=buffer, lease=lease)
        self.first_step = 1
        self.skipped = 0  # steps in a row that updated nothing
        self.step_times = Longest(RECENT_STEPS)
        self.stopping: Stopped | None = None

    # --- starting -------------------------------------------------------------------------------------------------

    def resume(self, state: TrainingState) -> None:
        """Continue from a checkpoint: restore its state, and apply the sync records up to its sync again. The policy's
        weights must have been loaded from it already."""
        self.learner.restore(state)
        self.ahead.restore(state)
        self.first_step = state.step + 1

    def run(self) -> None:
        """Train up to the last step. The trainer consumes the trajectories that searchers append, and produces sync
        records, ledgers, versions and checkpoints.

        The trainer waits for searchers once, for the initial fill. With `sync.lag` it does not wait for the initial
        fill but, before each sync record, for a round of every searcher. With `sampling.max_age` it may also wait,
        before a sync record, for younger trajectories.

        On a GPU that is shared in shifts, a shift ends with each sync, and when the trainer has to wait.
        """
        self.syncs.publish(self.learner.snapshot(), max(self.ahead.applied, self.config.start.sync))
        self.shift.end()
        if self.first_step > self.config.training.steps:
            return
        if self.config.sync.lag is None:
            self.ahead.await_initial_fill()
        with self.ahead, self.syncs:
            try:
                self.take_steps()
            finally:
                self.ahead.leave()

    # --- the loop -------------------------------------------------------------------------------------------------

    def take_steps(self) -> None:
        """Take the remaining gradient steps. On a request to stop, end after a sync and raise Stopped. The next batch
        is prepared during a step, once the sync record that the batch needs is stored."""
        config, records = self.config, list[StepRecord]()
        admitted = self.ahead.admit(config.sync_before(self.first_step))
        upcoming = self.ahead.prepare(self.first_step, admitted)
        for step in range(self.first_step, config.training.steps + 1):
            self.hear()
            self.syncs.check()
            if self.stopping and self.can_end_before(step):
                self.tell_of_last_sync(step - 1)
                self.syncs.keep(self.learner, sync=config.sync_before(step), step=step - 1, admitted=admitted)
                break
            began, seconds = time.monotonic(), dict[str, float]()
            with timed(seconds, "wait"):
                while not wait([upcoming], 0.5).done:
                    self.shift.end()
                    self.syncs.check()  # the batch may wait for searchers, which may wait for a version
                prepared = upcoming.result()
            if self.shift.is_shared:
                with timed(seconds, "shift"):
                    self.shift.begin()
            closes = step == config.step_of_sync(config.sync_of_step(step))
            if closes:
                admitted = self.ahead.admit(config.sync_of_step(step))
            if step < config.training.steps:
                upcoming = self.ahead.prepare(step + 1, admitted)
            with timed(seconds, "forward_backward"):
                learned = self.learner.learn(step, prepared.batch)
            self.count_skipped(step, learned)
            copy = self.copy(step, seconds) if closes else None
            if closes:
                self.shift.end()
            seconds["step"] = time.monotonic() - began
            records.append(self.record(step, prepared, learned, seconds))
            if copy:
                self.syncs.write(copy, records, admitted)
                records = []
                if self.stopping:
                    self.tell_of_last_sync(step)
                    break
        self.syncs.finish()
        if self.stopping:
            raise self.stopping

    def count_skipped(self, step: int, learned: Learned) -> None:
        """Report a step that was skipped because the loss or the gradient is not finite. One such step may be due to
        its batch. Raise RunFailed after more than `limits.skipped_steps` in a row: then the policy must be the
        cause."""
        self.skipped = self.skipped + 1 if learned.skipped else 0
        if learned.skipped:
            self.events.write("step-skipped", learned.skipped, severity="warning", step=step)
        if self.skipped > (most := self.config.limits.skipped_steps):
            raise RunFailed(
                f"{learned.skipped}; the loss or the gradient was not finite in more than {most} steps in a row "
                "(limits.skipped_steps)"
            )

    def copy(self, step: int, seconds: dict[str, float]) -> Copy:
        """Copy the state that the sync after this step stores."""
        sync = self.config.sync_of_step(step)
        last = sync == self.config.last_sync or self.stopping is not None
        return self.syncs.copy(self.learner, sync=sync, step=step, last=last, seconds=seconds)

    # --- requests to stop, and reports ----------------------------------------------------------------------------

    def can_end_before(self, step: int) -> bool:
        """True if this life has just closed a sync, every version is published, and the next sync record may wait for
        searchers, which may have stopped already."""
        closed = self.config.sync_before(step)
        return self.config.awaits_searchers and self.first_step < step == self.config.step_of_sync(closed) + 1

    def hear(self) -> None:
        """Remember a request to stop. The trainer stops at a sync, which gets a checkpoint, so that no step has to be
        repeated."""
        try:
            self.lease.check()
        except Stopped as stopped:
            self.stopping = self.stopping or stopped

    def seconds_to_stop(self, step: int) -> float:
        """Estimate how long the trainer needs after this step if it is asked to stop, from the longest of its recent
        steps and of its recent syncs."""
        steps = steps_to_stop(self.config, step, is_stopping=self.stopping is not None)
        return round(steps * self.step_times.seconds + self.syncs.times.seconds, 1)

    def tell_of_last_sync(self, step: int) -> None:
        seconds = round(self.syncs.times.seconds, 1)
        self.lease.tell(f"stopping: stores the sync after step {step}", step=step, seconds_to_stop=seconds)

    def record(self, step: int, prepared: Prepared, learned: Learned, seconds: Mapping[str, float]) -> StepRecord:
        """Return the ledger's record of the step. Also report the step to metrics, alarms and lease."""
        config = self.config
        version = Version(config.sync_before(step), self.syncs.attempt)
        metrics = {
            **learned.metrics,
            **batch_metrics(prepared.draws, prepared.batch),
            **{f"seconds_{part}": spent for part, spent in {**prepared.seconds, **seconds}.items()},
        }
        self.metrics.write(dict(metrics), step=step)
        self.alarms.update(self.learning.find(step, metrics, learned.outcomes))
        self.step_times.add(seconds["step"])
        state = "stopping at the next sync" if self.stopping else f"step {step} of {config.training.steps}"
        # Searchers can load the published version. It is often older than the step's own, which is still being stored.
        told = {"version": self.syncs.published, "seconds_to_stop": self.seconds_to_stop(step), **metrics}
        self.lease.tell(state, step=step, **told)
        return StepRecord(
            step=step,
            sync=config.sync_of_step(step),
            version=version,
            draws=prepared.draws,
            outcomes=learned.outcomes,
            metrics=metrics,
        )
