"""The replay buffer of the trainer. The sync records determine the rows that it holds. A draw is an SQL query over an
index of these rows."""

from collections.abc import Mapping, Sequence
from typing import Any

from pyarrow import Table

from storage import layout
from storage.buffer.arrivals import Arrivals
from storage.buffer.buffer_events import BufferEvents
from storage.buffer.index import Index
from storage.buffer.settings import Settings
from storage.buffer.sync_record_chain import RecordChain
from storage.log.payloads import Payloads
from storage.log.schema import COLUMNS
from storage.log.sync_records import Recording, Shard, StoredRecord, SyncRecord
from storage.objects import records
from storage.runs.events import Events
from storage.runs.retention import given_up
from storage.runs.run import Run
from tba.errors import Damaged, Missing
from tba.fetched import Fetched
from tba.types import Draw, Version

_GIVEN_UP = "given_up"  # in the queues of a checkpoint: the shards that had been given up when it was stored


class DuckReplayBuffer:
    """The replay buffer of one attempt; see `ReplayBuffer` in tba/interfaces.py. A draw follows from the seed, the
    sampler and the sync records alone. It does not depend on the run's name, on how often the buffer looked for
    arrivals, or on whether the buffer was rebuilt in between. `searchers_in_step` is the number of searchers if
    `sync.lag` makes them go in step with the trainer; record n then admits round n of each of them."""

    def __init__(
        self,
        run: Run,
        settings: Settings,
        *,
        sampler_sql: str,
        attempt: int,
        events: Events,
        searchers_in_step: int | None = None,
    ):
        self.run, self.attempt = run, attempt
        self.records = RecordChain(run, attempt)
        self.events = BufferEvents(events)
        self.index = Index(
            sampler_sql,
            seed=settings.seed,
            sampling=settings.sampling,
            training=settings.training,
            step_of_version=self._step_of_version,
            threads=settings.limits.draw_threads,
        )
        self.payloads = Payloads(
            run,
            memory_bytes=int(settings.limits.memory_gb * 1e9),
            disk_bytes=int(settings.limits.disk_gb * 1e9),
            behaviour=settings.objective.needs_tokens,
            values=settings.objective.needs_values,
        )
        self.needs_reference = settings.objective.needs_reference
        self.arrivals = Arrivals(run, self.payloads, self._check)
        self._has_looked = False  # whether `ready` has looked since the last record was created
        self.given_up = given_up(run).shards  # keys of admitted shards that were lost: the buffer leaves them out
        replays = run.inherits if run.inherits and run.inherits.replays else None
        self.recording = Recording(replays, given_up=self.given_up) if replays else None
        self.shards: dict[str, Shard] = {}  # admitted shards by searcher/seq
        self.in_step = None if self.recording else searchers_in_step
        self.batch = settings.training.prompts_per_step * settings.training.responses_per_prompt
        self.applied = -1
        self.gradient_steps = {0: 0}  # by sync whose record was applied: the gradient step that it follows
        self._queues = self.index.queues()

    # --- syncs ----------------------------------------------------------------------------------------------------

    def sync(self, sync: int, *, step: int) -> int:
        if sync != self.applied + 1:
            raise ValueError(f"records are applied in order: expected record {self.applied + 1}, got {sync}")
        stored = self.records.read(sync) or self._create(sync, step)
        if stored.record.step != step:
            raise Damaged(
                f"{self.run.url}/{layout.sync(sync)} says that it follows step {stored.record.step}, but sync {sync} "
                f"of this run follows step {step}"
            )
        self._admit(stored)
        branches = self.index.branches
        self.events.tell_of_bounds(sync, branches.without_bounds(), branches.mean_reward_between)
        return stored.record.rows

    def replay(self, sync: int) -> None:
        while self.applied < sync:
            stored = self.records.read(self.applied + 1)
            if stored is None:
                raise Missing(f"{self.run.url}/{layout.sync(self.applied + 1)} does not exist")
            self._admit(stored)

    def _admit(self, stored: StoredRecord) -> None:
        self.gradient_steps[stored.record.sync] = stored.record.step
        self.arrivals.settle(shard.key for shard in stored.record.shards if shard.key in self.given_up)
        self._apply(stored.record.without(self.given_up))
        self.applied = stored.record.sync
        self.records.append(stored)
        self._queues = self.index.queues()

    def _check(self, table: Table) -> None:
        """Raise Damaged, with the reason, if the rows of a shard cannot be learned from. A record that admitted them
        would end this attempt and all later ones."""
        self.index.check(table)
        if self.needs_reference and table["ref_logps"].null_count:
            raise Damaged("column 'ref_logps' has missing values, and the objective needs them")

    def _step_of_version(self, version: Version) -> int:
        """Return the gradient step that a version follows. Raise Damaged if it is not known yet. A version is published
        after its sync record is stored, so a shard that cites the version is admitted by a later record. If searchers
        go in step, a round can cite the version of the very sync that admits it; `ready` sets the step of that version
        beforehand."""
        step = self.recording.step_of(version) if self.recording else None
        step = self.gradient_steps.get(version.number) if step is None else step
        if step is None:
            raise Damaged(f"it cites version {version}, but no record of that sync has been applied")
        return step

    def recorded(self, sync: int) -> bool:
        return self.records.has(sync)

    def ready(self, sync: int, *, step: int, until: int) -> bool:
        bounded = self.index.pool.max_age is not None
        if self.recording or not (bounded or self.in_step) or self.recorded(sync):
            return True
        if self.in_step:
            self.gradient_steps.setdefault(sync, step)  # the version of this very sync can have generated a round
        self.arrivals.look()
        self._has_looked = True
        if self.in_step:
            return all(self.arrivals.knows(layout.shard(searcher, sync)) for searcher in range(self.in_step))
        arrived = [arrival.light for arrival in self.arrivals.found.values()]
        return self.index.count_young(until, arrived) >= self.batch

    def waiting(self) -> int:
        self.arrivals.look()
        return self.arrivals.rows()

    def _create(self, sync: int, step: int) -> StoredRecord:
        """Create a sync record that admits all shards which have arrived. Return it, or the record that another process
        has created first."""
        arrived = self._arrived(sync, step)
        record = SyncRecord(
            sync=sync,
            step=step,
            attempt=self.attempt,
            shards=arrived,
            rows=sum(shard.rows for shard in arrived),
            previous_sha256=self.records.newest_sha256,
            refused=sorted(self.arrivals.refused.values(), key=lambda refusal: refusal.key),
            created_at=records.now(),
        )
        self.records.check_attempt()
        self.events.tell_what_is_left_out(record, self.arrivals.unread)
        stored = self.records.create(record)
        if stored.record is record and not record.rows:
            self.events.tell_of_an_empty_record(sync, self.index.newest)
        return stored

    def _arrived(self, sync: int, step: int) -> list[Shard]:
        if self.recording:
            return self.recording.arrivals(step, self.shards)
        if not self._has_looked:  # a look lists every searcher's folder
            self.arrivals.look()
        self._has_looked = False
        shards = [arrival.shard for arrival in self.arrivals.found.values()]
        if self.in_step is not None:
            shards = [shard for shard in shards if shard.seq <= sync]
        return sorted(shards, key=lambda shard: (shard.searcher, shard.seq))

    def _apply(self, record: SyncRecord) -> None:
        shards = sorted(record.shards, key=lambda shard: (shard.searcher, shard.seq))
        light = {shard.key: self.arrivals.take(shard) for shard in shards}
        unseen = [shard for shard in shards if light[shard.key] is None]
        light.update({shard.key: table for shard, table in self.payloads.reader.light(unseen, COLUMNS)})
        named = {f"{shard.searcher}/{shard.seq}": shard for shard in shards}
        self.index.extend(record.sync, [(name, light[shard.key]) for name, shard in named.items()], step=record.step)
        self.shards.update(named)
        self.arrivals.settle([shard.key for shard in shards] + [refusal.key for refusal in record.refused])

    # --- draws ----------------------------------------------------------------------------------------------------

    def queues(self) -> dict[str, Any]:
        return {**self._queues, **({_GIVEN_UP: sorted(self.given_up)} if self.given_up else {})}

    def restore(self, queues: Mapping[str, Any]) -> None:
        """Restore the prompt queues from a checkpoint. The queues name prompts by their position in the buffer. So if
        shards were given up after the checkpoint was stored, the positions have changed: the queues are not restored,
        every prompt can be drawn again, and an event says so."""
        if set(queues.get(_GIVEN_UP, ())) == self.given_up:
            self.index.restore(queues)
            self._queues = self.index.queues()
        else:
            self.events.tell_of_restarted_queues(self.given_up)

    def draw(self, step: int) -> list[Draw]:
        return self.index.draw(step)

    def fetch(self, draws: Sequence[Draw]) -> Fetched:
        places = [draw.trajectory_id.rpartition("/") for draw in draws]
        return self.payloads.fetch([(self.admitted_shard(shard), int(row)) for shard, _, row in places])

    def admitted_shard(self, name: str) -> Shard:
        """Return an admitted shard by its name. Raise Missing if no applied record admits it."""
        if name not in self.shards:
            raise Missing(f"no applied record of {self.run.url} admits shard {name!r}")
        return self.shards[name]
