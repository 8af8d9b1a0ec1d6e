"""Compaction: the rows of many admitted shards move into one object. On request, rows that are no longer needed lose
their payloads.

First the object is stored, then its record, and then the shards are removed. A shard is removed only after a compaction
holds all of its rows. A compaction is removed only after compactions of higher rank, which readers prefer, hold all of
its rows. So it does no harm if a compaction is killed at any point, or if two run at the same time: the next one
continues from what is stored, and removes what is stored twice.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from storage import layout
from storage.log.compactions import Compaction, Compactions, encode
from storage.log.sync_records import read_chain
from storage.maintenance.compaction_format import Admitted, decode_object, encode_object, misfit
from storage.maintenance.compaction_reader import CompactionReader, Source
from storage.maintenance.compaction_removal import CompactionRemoval
from storage.maintenance.droppable_payloads import DroppablePayloads
from storage.objects import manifest_folders
from storage.runs import retention
from storage.runs.attempts import accepts, chain
from storage.runs.run import Run
from tba.errors import AlreadyExists, Damaged, Missing
from tba.types import Eligibility, Version

Progress = Callable[[int, int], None]
"""Called with the number of objects written so far and the number of all objects to write."""

SHARDS, BYTES = 256, 64 << 20
"""Maximum number of shards in one object, and maximum number of their bytes together."""


@dataclass
class Compacted:
    """The result of `compact`."""

    run: str
    upto: Version | None  # shards admitted up to this checkpoint were considered; None if there is no checkpoint
    shards: int = 0  # number of the run's own shards that lie in compactions now
    written: list[str] = field(default_factory=list)  # keys of the objects that were written
    removed: int = 0  # number of removed objects
    bytes_written: int = 0
    payloads_given_up: int = 0  # number of rows that lost their payload
    retention: int | None = None  # the retention record that gives these payloads up
    forks: list[str] = field(default_factory=list)  # forks: they may draw rows that no step of this run can draw
    left: dict[str, str] = field(default_factory=dict)  # by key of an object that stays as it is: the reason


def compact(
    run: Run,
    *,
    keep_checkpoints: int,
    drop_beyond: Eligibility | None = None,
    progress: Progress | None = None,
) -> Compacted:
    """Compact the shards that were admitted up to the oldest of the newest `keep_checkpoints` checkpoints.
    `drop_beyond` is the eligibility rule of the run's index; if it is given, rows of these shards that no gradient step
    after that checkpoint can draw lose their payloads, unless a fork may draw them or too few rows of an object would
    lose theirs."""
    return _Compactor(run, keep_checkpoints, drop_beyond).compact(progress or (lambda done, total: None))


class _Compactor:
    """Decides which shards go into which object, and writes the objects."""

    def __init__(self, run: Run, keep: int, drop_beyond: Eligibility | None):
        self._run, self._drop_beyond = run, drop_beyond
        self._compactions = Compactions(run)
        lost = retention.given_up(run).shards
        self._synced = [record.without(lost) for record in read_chain(run)]
        self._checkpoint = _oldest_checkpoint(run, keep)
        self._payloads = DroppablePayloads(run, self._compactions)
        self._sources = CompactionReader(run, self._compactions)
        self._outcome = Compacted(run.name, self._checkpoint)

    def compact(self, progress: Progress) -> Compacted:
        self._adopt()
        self._compactions.look()
        chosen = self._chosen()
        if chosen and self._drop_beyond and self._checkpoint:
            self._payloads.choose(self._synced, self._checkpoint, self._drop_beyond)
        groups = [group for group in self._groups(chosen) if self._is_worth_it(group)]
        self._payloads.give_up(groups)
        for done, group in enumerate(groups):
            progress(done, len(groups))
            self._write(group)
        removal = CompactionRemoval(self._run, self._compactions, self._sources)
        removal.remove()
        outcome = self._outcome
        outcome.retention, outcome.forks = self._payloads.record, self._payloads.forks
        outcome.shards, outcome.removed = removal.shards, removal.removed
        outcome.left = {**self._sources.left, **removal.left}
        return outcome

    # --- what there is to do ----------------------------------------------------------------------------------------

    def _adopt(self) -> None:
        """Write the missing records of compactions whose objects are stored. Usually the process that made the object
        was killed, but a live process may just be about to write the record. In both cases, the compaction then counts
        like any other."""
        stored = {entry.key for entry in self._run.own.list(layout.COMPACTIONS)}
        admitted = {shard.key: shard.sha256 for record in self._synced for shard in record.shards}
        for key in sorted(stored):
            name = layout.parse_compaction(key)
            if name is None or key != name.object or name.record in stored or self._run.store.exists(name.record):
                continue
            with suppress(Missing, Damaged):
                compaction = decode_object(self._run.store.read(key), key)
                if all(admitted.get(part.shard.key) == part.shard.sha256 for part in compaction.parts):
                    self._record(compaction)

    def _chosen(self) -> list[Admitted]:
        """Return the run's own shards that were admitted up to the checkpoint. Inherited shards are left out."""
        if self._checkpoint is None:
            return []
        shared = self._run.inherits
        return [
            Admitted(shard, record.sync, record.step)
            for record in self._synced
            if record.sync <= self._checkpoint.number
            for shard in record.shards
            if not (shared and shared.inherits(shard.key))
        ]

    def _groups(self, chosen: Sequence[Admitted]) -> Iterator[list[Admitted]]:
        """Yield groups of shards in the order of the sync records, one group for each object to write. A compaction
        that is large enough stays as it is, unless enough of its payloads can be given up."""
        again = {compaction.object: self._is_made_again(compaction) for compaction in self._compactions.look()}
        group: list[Admitted] = []
        size = 0
        for admitted in chosen:
            place = self._compactions.place(admitted.shard)
            stays = place is not None and not again.get(place.compaction.object, True)
            if group and (stays or len(group) == SHARDS or size + admitted.shard.bytes > BYTES):
                yield group
                group, size = [], 0
            if not stays:
                group.append(admitted)
                size += admitted.shard.bytes
        if group:
            yield group

    def _is_made_again(self, compaction: Compaction) -> bool:
        small = len(compaction.parts) < SHARDS // 2 and compaction.bytes < BYTES // 2
        return small or self._payloads.are_worth_it([part.shard for part in compaction.parts])

    def _is_worth_it(self, group: Sequence[Admitted]) -> bool:
        """Return False if writing this group would only rewrite one compaction without giving up enough payloads."""
        places = [self._compactions.place(admitted.shard) for admitted in group]
        sources = {place.compaction.object for place in places if place}
        return None in places or len(sources) > 1 or self._payloads.are_worth_it([admitted.shard for admitted in group])

    # --- writing ----------------------------------------------------------------------------------------------------

    def _write(self, group: Sequence[Admitted]) -> None:
        sources: list[Source] = []
        for source in self._sources.read(group):
            if why := misfit(source.table, [other.table for other in sources]):
                self._sources.left[source.admitted.shard.key] = why
            else:
                sources.append(source)
        objects = {source.compaction.object if source.compaction else None for source in sources}
        same = len(objects) == 1 and None not in objects
        if sources and not (same and not any(self._payloads.count(source.admitted.shard) for source in sources)):
            self._store(*self._encode(sources))

    def _encode(self, sources: Sequence[Source]) -> tuple[Compaction, bytes]:
        shards = [source.admitted for source in sources]
        replaced = [source.compaction for source in sources if source.compaction]
        numbers = {number for compaction in replaced for number in compaction.retention}
        compaction, data = encode_object(
            self._run.name,
            shards,
            [self._payloads.without(source.admitted.shard, source.table) for source in sources],
            generation=1 + max((compaction.generation for compaction in replaced), default=0),
            retention=sorted(numbers | self._payloads.records_about(admitted.shard for admitted in shards)),
        )
        places = (self._compactions.place(admitted.shard) for admitted in shards)
        before = sum(place.part.given_up for place in places if place)
        self._outcome.payloads_given_up += sum(part.given_up for part in compaction.parts) - before
        return compaction, data

    def _store(self, compaction: Compaction, data: bytes) -> None:
        with suppress(AlreadyExists):  # another process made the same object; removal reads it first
            self._run.store.create(compaction.object, data)
        self._record(compaction)
        self._outcome.written.append(compaction.object)
        self._outcome.bytes_written += len(data)

    def _record(self, compaction: Compaction) -> None:
        with suppress(AlreadyExists):
            self._run.store.create(compaction.record, encode(compaction))


def _oldest_checkpoint(run: Run, keep: int) -> Version | None:
    """Return the oldest of the newest `keep` checkpoints on the chain of attempts that the run itself has written.
    Return None if it has written none, for example a new fork."""
    spans, shared = chain(run), run.parent.sync if run.parent else 0
    complete = manifest_folders.complete(run.own, layout.CHECKPOINTS)
    own = [checkpoint for checkpoint in complete if accepts(spans, checkpoint) and checkpoint.number > shared]
    return own[-keep:][0] if own else None
