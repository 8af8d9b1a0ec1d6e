"""Compaction: the rows of many admitted shards move into one object; if asked to, payloads are given up on the way.

The object comes first, then its record, then the shards are removed. Nothing is removed unless a compaction of higher
rank holds it whole, so it does no harm to be killed anywhere, or to be two at once: whoever comes next goes on with
what it finds, and removes what is there twice.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from storage import layout
from storage.log.compactions import Compaction, Compactions, encode
from storage.log.syncs import read_chain
from storage.maintenance.compaction_format import Admitted, decode_object, encode_object, misfit
from storage.maintenance.compaction_removal import CompactionRemoval
from storage.maintenance.compaction_sources import CompactionSources, Source
from storage.maintenance.droppable_payloads import DroppablePayloads
from storage.objects import manifest_folders
from storage.runs import retention
from storage.runs.attempts import accepts, chain
from storage.runs.run import Run
from tba.errors import AlreadyExists, Damaged, Missing
from tba.types import Eligibility, Version

Progress = Callable[[int, int], None]
"""Told how many of how many shards are done."""

SHARDS, BYTES = 256, 64 << 20
"""What an object holds at most."""


@dataclass
class Compacted:
    """What a compaction has done."""

    run: str
    upto: Version | None  # the checkpoint whose record is the last that was looked at; None if there is none
    shards: int = 0  # that lie in compactions now
    written: list[str] = field(default_factory=list)  # objects
    removed: int = 0  # objects
    bytes_written: int = 0
    payloads_given_up: int = 0  # of how many rows
    retention: int | None = None  # the record that says so
    forks: list[str] = field(default_factory=list)  # that may draw what no step of the run can
    left: dict[str, str] = field(default_factory=dict)  # shards that stay as they are, and why


def compact(
    run: Run,
    *,
    keep_checkpoints: int,
    drop_beyond: Eligibility | None = None,
    progress: Progress | None = None,
) -> Compacted:
    """Compact what was admitted up to the oldest of the newest `keep_checkpoints`. With `drop_beyond`, which is the
    rule of the run's index, rows that it cannot draw from then on lose their payloads, unless a fork may draw them."""
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
        self._sources = CompactionSources(run, self._compactions)
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
        """Write the records of objects that lack theirs, since whoever made them was killed. A process that lives may
        just be about to write such a record. Either way the object counts from then on as any other."""
        found = {entry.key for entry in self._run.own.list(layout.COMPACTIONS)}
        admitted = {shard.key: shard.sha256 for record in self._synced for shard in record.shards}
        for key in sorted(found):
            name = layout.parse_compaction(key)
            if name is None or key != name.object or name.record in found or self._run.store.exists(name.record):
                continue
            with suppress(Missing, Damaged):
                compaction = decode_object(self._run.store.read(key), key)
                if all(admitted.get(part.shard.key) == part.shard.sha256 for part in compaction.parts):
                    self._record(compaction)

    def _chosen(self) -> list[Admitted]:
        """Return the run's own shards that a compaction may take in."""
        if self._checkpoint is None:
            return []
        found = [
            Admitted(shard, record.sync, record.step)
            for record in self._synced
            if record.sync <= self._checkpoint.number
            for shard in record.shards
        ]
        shared = self._run.inherits
        return [it for it in found if not (shared and shared.inherits(it.shard.key))]

    def _groups(self, chosen: Sequence[Admitted]) -> Iterator[list[Admitted]]:
        """Yield the shards of one object each, in the order of the records. A compaction that is large enough stays as
        it is, unless enough of its payloads can be given up."""
        again = {it.object: self._is_made_again(it) for it in self._compactions.look()}
        group: list[Admitted] = []
        size = 0
        for it in chosen:
            place = self._compactions.place(it.shard)
            stays = place is not None and not again.get(place.compaction.object, True)
            if group and (stays or len(group) == SHARDS or size + it.shard.bytes > BYTES):
                yield group
                group, size = [], 0
            if not stays:
                group.append(it)
                size += it.shard.bytes
        if group:
            yield group

    def _is_made_again(self, compaction: Compaction) -> bool:
        small = len(compaction.parts) < SHARDS // 2 and compaction.bytes < BYTES // 2
        return small or self._payloads.are_worth_it([part.shard for part in compaction.parts])

    def _is_worth_it(self, group: Sequence[Admitted]) -> bool:
        """Return False if writing the group would make one compaction out of the same."""
        places = [self._compactions.place(it.shard) for it in group]
        sources = {place.compaction.object for place in places if place}
        return None in places or len(sources) > 1 or self._payloads.are_worth_it([it.shard for it in group])

    # --- writing ----------------------------------------------------------------------------------------------------

    def _write(self, group: Sequence[Admitted]) -> None:
        taken: list[Source] = []
        for source in self._sources.read(group):
            if why := misfit(source.table, [other.table for other in taken]):
                self._sources.left[source.admitted.shard.key] = why
            else:
                taken.append(source)
        objects = {source.compaction.object if source.compaction else None for source in taken}
        same = len(objects) == 1 and None not in objects
        if taken and not (same and not any(self._payloads.count(it.admitted.shard) for it in taken)):
            self._store(*self._encode(taken))

    def _encode(self, taken: Sequence[Source]) -> tuple[Compaction, bytes]:
        shards = [source.admitted for source in taken]
        sources = [source.compaction for source in taken if source.compaction]
        numbers = {number for source in sources for number in source.retention}
        compaction, data = encode_object(
            self._run.name,
            shards,
            [self._payloads.without(it.shard, source.table) for it, source in zip(shards, taken, strict=True)],
            generation=1 + max((source.generation for source in sources), default=0),
            retention=sorted(numbers | self._payloads.records_about(it.shard for it in shards)),
        )
        before = sum(place.part.given_up for it in shards if (place := self._compactions.place(it.shard)))
        self._outcome.payloads_given_up += sum(part.given_up for part in compaction.parts) - before
        return compaction, data

    def _store(self, compaction: Compaction, data: bytes) -> None:
        with suppress(AlreadyExists):  # somebody was at the same; what it holds is seen before anything is removed
            self._run.store.create(compaction.object, data)
        self._record(compaction)
        self._outcome.written.append(compaction.object)
        self._outcome.bytes_written += len(data)

    def _record(self, compaction: Compaction) -> None:
        with suppress(AlreadyExists):
            self._run.store.create(compaction.record, encode(compaction))


def _oldest_checkpoint(run: Run, keep: int) -> Version | None:
    """Return the oldest of the newest `keep` checkpoints that the run keeps for itself, not for its forks. A fork has
    some of its own later."""
    spans, shared = chain(run), run.parent.sync if run.parent else 0
    own = [
        it for it in manifest_folders.complete(run.own, layout.CHECKPOINTS) if accepts(spans, it) and it.number > shared
    ]
    return own[-keep:][0] if own else None
