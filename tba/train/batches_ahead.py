"""Prepare the batches of a trainer in a separate thread, one batch ahead of the gradient steps.

Before the thread draws a batch, it applies the sync records of all syncs that come before the batch's step. With
`sync.lag` or `sampling.max_age`, the thread waits, before it applies a sync record, until the searchers have delivered
what these settings require.
"""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from tba.batches.batching import Batch
from tba.config import Config
from tba.errors import DeadlinePassed, Stopped
from tba.interfaces import Lease, ReplayBuffer
from tba.runtime.waiting import looks, timed
from tba.train.learner import Learner
from tba.train.training_state import TrainingState
from tba.types import Draw

_SILENT = 1.0  # seconds of waiting for searchers before the lease reports it
_FILL_EVERY = 1.0  # seconds between two checks of the initial fill: each check lists the store


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A batch, its draws, and the seconds that each part of the preparation took."""

    batch: Batch
    draws: Sequence[Draw]
    seconds: Mapping[str, float]


class BatchesAhead:
    """Applies sync records and prepares batches, in the order of the calls."""

    def __init__(self, config: Config, *, learner: Learner, buffer: ReplayBuffer, lease: Lease):
        self.config, self.learner, self.buffer, self.lease = config, learner, buffer, lease
        self.applied = -1  # newest sync whose record the buffer has applied
        self._pool = ThreadPoolExecutor(1, "ahead")
        self._seconds: dict[str, float] = {}  # spent since the last batch
        self._leaving = threading.Event()  # set when the thread must stop waiting for searchers

    # --- in the trainer's thread ----------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait until the thread has ended."""
        self._pool.shutdown()

    def leave(self) -> None:
        """Cancel the jobs that have not begun. If the thread is waiting for searchers, end that wait."""
        self._leaving.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def restore(self, state: TrainingState) -> None:
        """Continue from a checkpoint: apply the sync records up to its sync again, and restore its prompt queues."""
        self.buffer.replay(state.sync)
        self.buffer.restore(state.queues)
        self.applied = state.sync

    def await_initial_fill(self) -> None:
        """Wait until enough trajectories have arrived. Do not wait if sync record 0 is stored already."""
        wanted, arrived, deadline = self.config.search.initial_fill, 0, self.config.limits.data_deadline
        for _ in looks(deadline, every=_FILL_EVERY):
            if self.buffer.recorded(0):
                return
            self.lease.check()
            arrived = self.buffer.waiting()
            if arrived >= wanted:
                return
            self.lease.tell(f"waiting for the initial fill: {arrived} of {wanted}", arrived=arrived, wanted=wanted)
        raise DeadlinePassed(
            f"only {arrived} of {wanted} trajectories (search.initial_fill) have arrived after {deadline:.0f} s "
            f"(limits.data_deadline): {self._who_is_missing}"
        )

    def admit(self, sync: int) -> Future[dict[str, Any]]:
        """Apply sync record `sync` in the thread, unless it is applied already. The result of the returned future is
        the state of the prompt queues after this record, before any later draw."""
        return self._pool.submit(self._admit, sync)

    def prepare(self, step: int, admitted: Future[dict[str, Any]]) -> Future[Prepared]:
        """Prepare the batch of a step in the thread, once the sync record before this step is applied. `admitted` is
        the future that `admit` returned for this record."""
        return self._pool.submit(self._prepare, step, admitted)

    # --- in the thread --------------------------------------------------------------------------------------------

    def _admit(self, sync: int) -> dict[str, Any]:
        config = self.config
        if sync > self.applied:
            if config.sync.lag is not None or (config.awaits_searchers and sync < config.last_sync):
                self._await_searchers(sync)
            with timed(self._seconds, "sync"):
                self.buffer.sync(sync, step=config.step_of_sync(sync))
            self.applied = sync
        return self.buffer.queues()

    def _await_searchers(self, sync: int) -> None:
        """Wait until the searchers have appended the trajectories that this sync record must admit. With `sync.lag`
        these are one round of every searcher. With `sampling.max_age` they are enough young trajectories for all
        batches before the next sync record. A request to stop ends the wait without this record, and so without a
        ledger and a checkpoint of this sync: the steps since the newest checkpoint are then repeated when the run
        continues."""
        deadline = self.config.limits.data_deadline
        step, until = self.config.step_of_sync(sync), self.config.step_of_sync(sync + 1)
        for waited in looks(deadline):
            if self.buffer.ready(sync, step=step, until=until):
                return
            self.lease.check()
            if self._leaving.is_set():
                raise Stopped("the trainer has failed meanwhile")
            if self.config.sync.lag is None and waited > _SILENT:
                self.lease.tell("waiting for younger responses (sampling.max_age)", step=step)
        if self.config.sync.lag is not None:
            raise DeadlinePassed(
                f"round {sync} of some searcher has not arrived after {deadline:g} s (limits.data_deadline): are all "
                "searchers alive?"
            )
        raise DeadlinePassed(
            f"after {deadline:g} s (limits.data_deadline) fewer than {self.config.batch} responses (a batch) are there "
            f"that are at most {self.config.sampling.max_age} steps old (sampling.max_age) at step {until}, the last "
            f"step before the next sync: {self._who_is_missing}"
        )

    @property
    def _who_is_missing(self) -> str:
        if self.config.search.searchers:
            return "are the searchers alive?"
        return "with search.searchers=0 the trainer waits for `tba import`"

    def _prepare(self, step: int, admitted: Future[dict[str, Any]]) -> Prepared:
        admitted.result()
        seconds, self._seconds = self._seconds, {}
        with timed(seconds, "draw"):
            draws = self.buffer.draw(step)
        with timed(seconds, "fetch"):
            fetched = self.buffer.fetch(draws)
        with timed(seconds, "collate"):
            batch = self.learner.collate(fetched)
        return Prepared(batch=batch, draws=draws, seconds=seconds)
