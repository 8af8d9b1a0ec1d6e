"""A trainer learns: it draws batches from the replay buffer, steps on the loss, and syncs every k steps.

Two threads with one job each, and those of tba/train/sync_writer.py. They share nothing but finished values:

    ahead    record of sync n (once step n x k has begun) -> draw -> fetch -> collate, one batch ahead
    main     forward, backward, step; a copy of all that at each sync
    syncing  ledger, version and checkpoint of sync n, from the copy

Order at a sync: record, ledger, checkpoint. A crash between any two of them is made good by the next attempt, which
takes the steps since the newest checkpoint again, on the same records.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tba.alarms import Alarms
from tba.batches.batching import Batch, batch_metrics
from tba.config import Config
from tba.errors import DeadlinePassed, RunFailed, Stopped
from tba.interfaces import CheckpointStore, EventLog, Lease, Ledger, MetricLog, ReplayBuffer, VersionStore
from tba.runtime.waiting import looks, timed
from tba.train.learner import Learned, Learner
from tba.train.learning_alarms import LearningAlarms
from tba.train.stop_time import RECENT_STEPS, Longest, steps_to_stop
from tba.train.sync_writer import Copy, SyncWriter
from tba.train.training_state import TrainingState
from tba.types import Draw, StepRecord, Version

_SILENT = 1.0  # seconds of waiting for searchers that are nothing to tell of


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What the thread ahead hands over: a batch, and how it came about."""

    batch: Batch
    draws: Sequence[Draw]
    seconds: Mapping[str, float]


class Trainer:
    def __init__(
        self,
        config: Config,
        *,
        attempt: int,
        learner: Learner,
        buffer: ReplayBuffer,
        ledger: Ledger,
        versions: VersionStore,
        checkpoints: CheckpointStore,
        metrics: MetricLog,
        lease: Lease,
        events: EventLog,
        scratch: Path,
    ):
        self.config, self.attempt, self.buffer = config, attempt, buffer
        self.learner = learner
        self.metrics, self.lease, self.events = metrics, lease, events
        self.learning = LearningAlarms(config.alarms)
        self.alarms = Alarms(events.write, patience=config.alarms.window)
        self.syncs = SyncWriter(
            config,
            attempt=attempt,
            ledger=ledger,
            versions=versions,
            checkpoints=checkpoints,
            lease=lease,
            scratch=scratch,
        )
        self.first_step = 1
        self.skipped = 0  # steps in a row
        self.applied = -1  # newest sync whose record the buffer holds
        self.step_times = Longest(RECENT_STEPS)
        self.reading: dict[str, float] = {}  # seconds the thread ahead has spent since the last batch
        self.stopping: Stopped | None = None
        self.leaving = threading.Event()  # whoever waits ahead need not go on

    # --- starting -------------------------------------------------------------------------------------------------

    def resume(self, state: TrainingState) -> None:
        """Go on from a checkpoint: the policy has been loaded from it, the records up to it are applied again."""
        self.learner.restore(state)
        self.buffer.replay(state.sync)
        self.buffer.restore(state.queues)
        self.applied, self.first_step = state.sync, state.step + 1

    def run(self) -> None:
        """Consumes recorded trajectories; produces records, ledger, versions and checkpoints. Waits for the initial
        fill, unblocked by any searcher's append, and never again; in step with searchers for each round of theirs, and
        where ages are bounded for what is young enough."""
        self.syncs.publish(self.learner.snapshot(), max(self.applied, self.config.start.sync))
        if self.first_step > self.config.training.steps:
            return
        if self.config.sync.lag is None:
            self.await_initial_fill()
        with ThreadPoolExecutor(1, "ahead") as ahead, self.syncs:
            try:
                self.take_steps(ahead)
            finally:
                self.leaving.set()
                ahead.shutdown(wait=False, cancel_futures=True)

    def await_initial_fill(self) -> None:
        """Until enough trajectories have arrived; a recorded start needs none."""
        wanted, began = self.config.search.initial_fill, time.monotonic()
        while not self.buffer.recorded(0):
            self.lease.check()
            arrived, waited = self.buffer.waiting(), time.monotonic() - began
            if arrived >= wanted:
                return
            if waited > self.config.limits.data_deadline:
                raise DeadlinePassed(
                    f"{arrived} of {wanted} trajectories (search.initial_fill) after {waited:.0f} s "
                    f"(limits.data_deadline): {self.who_is_missing}"
                )
            self.lease.tell(f"waiting for the initial fill: {arrived} of {wanted}", arrived=arrived, wanted=wanted)
            time.sleep(1.0)  # each look lists the store

    # --- the loop -------------------------------------------------------------------------------------------------

    def take_steps(self, ahead: ThreadPoolExecutor) -> None:
        """One batch ahead of the policy, never across a record that is not stored."""
        config, records = self.config, list[StepRecord]()
        admitted = ahead.submit(self.admit, config.sync_before(self.first_step))
        upcoming = ahead.submit(self.prepare, self.first_step, admitted)
        for step in range(self.first_step, config.training.steps + 1):
            self.hear()
            self.syncs.check()
            began, seconds = time.monotonic(), dict[str, float]()
            with timed(seconds, "wait"):
                while not wait([upcoming], 0.5).done:
                    self.syncs.check()  # what is waited for may depend on it
                prepared = upcoming.result()
            closes = step == config.step_of_sync(config.sync_of_step(step))
            if closes:
                admitted = ahead.submit(self.admit, config.sync_of_step(step))
            if step < config.training.steps:
                upcoming = ahead.submit(self.prepare, step + 1, admitted)
            with timed(seconds, "forward_backward"):
                learned = self.learner.learn(step, prepared.batch)
            self.count_skipped(step, learned)
            copy = self.copy(step, seconds) if closes else None
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
        """One that follows from its batch alone passes with the next batch; many in a row do not."""
        self.skipped = self.skipped + 1 if learned.skipped else 0
        if learned.skipped:
            self.events.write("step-skipped", learned.skipped, severity="warning", step=step)
        if self.skipped > (most := self.config.limits.skipped_steps):
            raise RunFailed(
                f"{learned.skipped}, and more than {most} steps in a row (limits.skipped_steps) were not finite"
            )

    def copy(self, step: int, seconds: dict[str, float]) -> Copy:
        """All that the sync after this step stores, as it is now."""
        sync = self.config.sync_of_step(step)
        last = sync == self.config.last_sync or self.stopping is not None
        return self.syncs.copy(self.learner, sync=sync, step=step, last=last, seconds=seconds)

    def admit(self, sync: int) -> dict[str, Any]:
        """Runs in the thread ahead: apply record `sync`; the prompt queues after it, before any later draw."""
        if sync > self.applied:
            if self.config.sync.lag is not None or (self.config.awaits_searchers and sync < self.config.last_sync):
                self.await_searchers(sync)
            with timed(self.reading, "sync"):
                self.buffer.sync(sync, step=self.config.step_of_sync(sync))
            self.applied = sync
        return self.buffer.queues()

    def await_searchers(self, sync: int) -> None:
        """Runs in the thread ahead: until the searchers have appended what this record must admit. In step with the
        trainer that is a round; where ages are bounded, what makes up a batch that is young enough for all steps before
        the next record. Whoever is asked to stop does so here, without this record, and so without a ledger and a
        checkpoint of this sync: the steps since the newest checkpoint are taken again."""
        deadline = self.config.limits.data_deadline
        step, until = self.config.step_of_sync(sync), self.config.step_of_sync(sync + 1)
        for waited in looks(deadline):
            if self.buffer.ready(sync, step=step, until=until):
                return
            self.lease.check()
            if self.leaving.is_set():
                raise Stopped("the trainer has failed meanwhile")
            if self.config.sync.lag is None and waited > _SILENT:
                self.lease.tell("waiting for younger responses (sampling.max_age)", step=step)
        if self.config.sync.lag is not None:
            raise DeadlinePassed(
                f"not every searcher's round {sync} is there after {deadline:g} s (limits.data_deadline): are they "
                "alive?"
            )
        raise DeadlinePassed(
            f"fewer than {self.config.batch} responses (a batch) are at most {self.config.sampling.max_age} steps old "
            f"(sampling.max_age) at step {until}, the last before the next sync, after {deadline:g} s "
            f"(limits.data_deadline): {self.who_is_missing}"
        )

    @property
    def who_is_missing(self) -> str:
        if self.config.search.searchers:
            return "are the searchers alive?"
        return "with search.searchers=0 it waits for `tba import`"

    def prepare(self, step: int, admitted: Future[dict[str, Any]]) -> Prepared:
        """Runs in the thread ahead, behind the record that this step may not cross: its batch."""
        admitted.result()
        seconds, self.reading = self.reading, {}
        with timed(seconds, "draw"):
            draws = self.buffer.draw(step)
        with timed(seconds, "fetch"):
            fetched = self.buffer.fetch(draws)
        with timed(seconds, "collate"):
            batch = self.learner.collate(fetched)
        return Prepared(batch=batch, draws=draws, seconds=seconds)

    # --- being told, and telling ----------------------------------------------------------------------------------

    def hear(self) -> None:
        """A request to stop is honoured at the next sync, with a checkpoint, so that nothing is taken again."""
        try:
            self.lease.check()
        except Stopped as stopped:
            self.stopping = self.stopping or stopped

    def seconds_to_stop(self, step: int) -> float:
        """Return how long the trainer needs after this step if it is asked to stop, by the longest of its recent steps
        and of its recent syncs."""
        steps = steps_to_stop(self.config, step, is_stopping=self.stopping is not None)
        return round(steps * self.step_times.seconds + self.syncs.times.seconds, 1)

    def tell_of_last_sync(self, step: int) -> None:
        seconds = round(self.syncs.times.seconds, 1)
        self.lease.tell(f"stopping: stores the sync after step {step}", step=step, seconds_to_stop=seconds)

    def record(self, step: int, prepared: Prepared, learned: Learned, seconds: Mapping[str, float]) -> StepRecord:
        """The step as the ledger keeps it; metrics and lease hear of it now."""
        config = self.config
        version = Version(config.sync_before(step), self.attempt)
        metrics = {
            **learned.metrics,
            **batch_metrics(prepared.draws, prepared.batch),
            **{f"seconds_{part}": spent for part, spent in {**prepared.seconds, **seconds}.items()},
        }
        self.metrics.write(dict(metrics), step=step)
        self.alarms.look(self.learning.find(step, metrics, learned.outcomes))
        self.step_times.add(seconds["step"])
        state = "stopping at the next sync" if self.stopping else f"step {step} of {config.training.steps}"
        # The last that can be taken, often one before the step's own: to store it takes its time.
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
