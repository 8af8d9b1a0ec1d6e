"""Reads the metrics of one run from its storage. A second reading asks only for what is new."""

import time
from datetime import UTC, datetime

from flows.metrics.catalogue import Values
from flows.metrics.log_metrics import EventMetrics, ScoreMetrics, SizeMetrics, StepMetrics, SyncMetrics
from flows.metrics.role_metrics import set_newest_step, set_roles, stored_shards
from flows.planning.run_summary import living, state, summarise
from storage import layout
from storage.objects.damage import DamageLog
from storage.runs.control import State, read_state
from storage.runs.leases import Lease, read_leases
from storage.runs.run import Run
from tba.config import parse_known

RUN_STATES = ("new", "running", "stopping", "stopped", "failed", "interrupted", "finished", "unreadable")
IS_OLD = 24 * 3600.0  # seconds after which a run without a sign of life counts as old


class RunReader:
    """Not safe to use from several threads at once."""

    def __init__(self, run: Run):
        self.damage = DamageLog()  # of objects that never change
        self.run = run.for_reading(self.damage.looking_at)
        self.config = parse_known(run.config)
        self.state = "new"
        self.last_sign = _time(run.created_at)  # the time of the newest sign of life
        self.was_looked_at = self.was_read = False
        self._is_unread = True  # whether a look has found something that no reading has shown
        self._wanted: State | None = None  # None if it is damaged
        self._leases: list[Lease] = []
        self._alive: list[Lease] = []
        self._stored_shards: dict[int, int] = {}  # by searcher, the largest number that its lease has told
        self._now_damaged = DamageLog()  # of leases and the wanted state, which may be written again
        self._syncs, self._steps = SyncMetrics(self.run, self.damage), StepMetrics(self.run, self.damage)
        self._scores = ScoreMetrics(self.run, self.damage)
        self._events, self._sizes = EventMetrics(self.run), SizeMetrics(self.run)

    @property
    def has_finished(self) -> bool:
        """True if the run was read after it had finished. It never changes again."""
        return self.was_read and self.state == "finished"

    @property
    def is_dormant(self) -> bool:
        """True if no role was alive at the last look, and the run was not created just now."""
        return self.was_looked_at and not self._alive and (self.state != "new" or self.is_old)

    @property
    def is_old(self) -> bool:
        return (datetime.now(UTC) - self.last_sign).total_seconds() > IS_OLD

    def look(self) -> bool:
        """Read the leases and the wanted state alone. Return True if the run has to be read: a role is alive, or no
        reading has shown yet what has changed."""
        damaged, wanted = DamageLog(), None
        leases = read_leases(self.run, damaged.looking_at)
        with damaged.looking_at(layout.STATE):
            wanted = read_state(self.run)
        before = self.last_sign, self._wanted, bool(self._alive)
        self._leases, self._wanted, self._now_damaged = leases, wanted, damaged
        self._alive = living(leases, self.config.limits.silent_after)
        self.last_sign = max([self.last_sign, *(_time(lease.renewed_at) for lease in leases)])
        after = self.last_sign, self._wanted, bool(self._alive)
        self._is_unread = self._is_unread or bool(self._alive) or after != before
        self.was_looked_at = True
        return self._is_unread

    def read(self) -> Values:
        """Read what is new since the last reading, after a `look`, and return all metrics of the run."""
        began = time.monotonic()
        for part in (self._syncs, self._steps, self._scores):
            part.read()
        for part in (self._events, self._sizes):
            part.read(at_once=not self._alive)  # this reading may be the last
        for searcher, shards in stored_shards(self._leases).items():
            self._stored_shards[searcher] = max(shards, self._stored_shards.get(searcher, 0))
        values = Values()
        self._set_run(values)
        set_roles(values, self._leases, {lease.role for lease in self._alive})
        set_newest_step(values, self._steps.newest, self._leases)
        self._syncs.set(values, self._stored_shards)
        self._sizes.set(values, self._published())
        self._events.set(values, is_alive=bool(self._alive))
        for part in (self._steps, self._scores):
            part.set(values)
        values.set("tba_run_damaged_objects", len(self.damage.found()) + len(self._now_damaged.found()))
        values.set("tba_run_read_seconds", time.monotonic() - began)
        self.was_read = True
        self._is_unread = self.state == "unreadable"  # the store may have failed
        return values

    def _set_run(self, values: Values) -> None:
        self.state = self._state()
        for name in RUN_STATES:
            values.set("tba_run_state", name == self.state, name)
        config = self.config
        values.set("tba_run_info", 1, str(config.task.name), config.objective.name)
        values.set("tba_run_planned_steps", config.training.steps)
        values.set("tba_run_searchers_wanted", self._wanted.searchers if self._wanted else None)

    def _state(self) -> str:
        """Return the state of the run. Of a run without living roles, this reads its scores and the names of its
        ledger."""
        if self._alive:
            return state(self.run, self._wanted, alive=True, finished=False)
        return summarise(self.run).state

    def _published(self) -> float | None:
        return next((it.progress.get("version") for it in self._alive if it.role == "trainer"), None)


def _time(text: str) -> datetime:
    """Return the time in a record. A text that is no time counts as long ago."""
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except ValueError:
        return datetime.fromtimestamp(0, UTC)
