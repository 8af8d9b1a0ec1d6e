"""Checks the compactions: their records, their objects, and the rows of their shards."""

import hashlib
from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from storage import layout
from storage.log.compactions import Compaction, Compactions, Part, Place, decode, is_record, places
from storage.log.schema import with_later
from storage.log.shard_checks import check_compacted
from storage.log.sync_records import Shard, SyncRecord
from storage.maintenance.check.context import CheckContext
from storage.runs.retention import RetentionRecord, given_up_payloads
from tba.errors import Damaged, Missing

Admitted = Mapping[str, tuple[Shard, SyncRecord]]
"""The shards that sync records admit, by key, each with its record."""


def read_compactions(context: CheckContext) -> list[Compaction]:
    """Return the compactions whose records can be read. Report damaged records."""
    compactions: list[Compaction] = []
    for key in filter(is_record, context.listed[layout.COMPACTIONS]):
        with context.findings.looking_at(key):
            try:
                compactions.append(decode(context.records.read(key), key))
            except Missing:
                context.findings.note(f"{key} has just been replaced by another compaction")
    if compactions:
        context.findings.count("compactions", len(compactions))
    return compactions


class CompactedRows:
    """Reads and verifies the rows of shards that lie in compactions. If a shard is compacted again during the check,
    its rows are read from the new place."""

    def __init__(self, context: CheckContext, payloads: Sequence[RetentionRecord]):
        self._context, self._run = context, context.run
        self._payloads = payloads  # the retention records that give up payloads, as read last
        self._compactions = Compactions(context.run)
        self._opened: tuple[Compaction, pq.ParquetFile] | None = None  # only the last object

    def read(self, place: Place, record: SyncRecord) -> pa.Table:
        """Return the rows of a shard that `record` admits. Raise Missing or Damaged if they cannot be found or do not
        match the records."""
        try:
            file = self.open_object(place.compaction)
        except Missing:
            if (now := self.place_now(place.part.shard, place)) is None:
                raise
            return self.read(now, record)
        table = file.read_row_groups(list(place.part.groups), use_threads=False)
        self._check_rows(table, place.part, record)
        return with_later(table)

    def place_now(self, shard: Shard, gone: Place | None) -> Place | None:
        """Return the new place of a shard that was not found at the place `gone`, because it has been compacted,
        perhaps again. Return None if it has no new place."""
        known = self._compactions.place(shard)
        now = self._compactions.place_now(shard, known) if known in (None, gone) else known
        return None if now == gone else now

    def has_taken_in(self, key: str) -> bool:
        """Look at the store again. True if a shard with this key now lies in a compaction."""
        self._compactions.look()
        return key in self._compactions.shards()

    def open_object(self, compaction: Compaction) -> pq.ParquetFile:
        """Return the object of a compaction as a Parquet file, after comparing it with its record."""
        if self._opened is None or self._opened[0] != compaction:
            self._opened = compaction, self._open(compaction)
        return self._opened[1]

    def _open(self, compaction: Compaction) -> pq.ParquetFile:
        data = self._run.store.read(compaction.object)
        if hashlib.sha256(data).hexdigest() != compaction.sha256 or len(data) != compaction.bytes:
            raise Damaged(f"{compaction.object} does not have the content that its record promises (sha256 differs)")
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        if (file.metadata.metadata or {}).get(b"run") != self._run.writer_of(compaction.object).encode():
            raise Damaged(f"{compaction.object} belongs to another run")
        if file.num_row_groups != compaction.parts[-1].end_group:
            wanted = compaction.parts[-1].end_group
            raise Damaged(f"{compaction.object} has {file.num_row_groups} row groups, but its record says {wanted}")
        return file

    def _check_rows(self, table: pa.Table, part: Part, record: SyncRecord) -> None:
        key = part.shard.key
        if len(table) != part.shard.rows:
            raise Damaged(f"{key} has {len(table)} rows in it, but its record says {part.shard.rows}")
        facts = {"seq": part.shard.seq, "sync": part.sync, "step": part.step}
        if odd := [name for name, value in facts.items() if set(table[name].to_pylist()) != {value}]:
            raise Damaged(f"{key}: column {odd[0]!r} is not {facts[odd[0]]} in every row")
        check_compacted(with_later(table), key, given_up=part.given_up)
        if part.given_up and not self._context.is_inherited(key):
            if (part.sync, part.step) != (record.sync, record.step):
                raise Damaged(f"{key} was admitted by record {record.sync}, not {part.sync}")
            if not self._gives_up(part):
                raise Damaged(f"{key}: {part.given_up} rows lack their tokens, but no retention record gives these up")

    def _gives_up(self, part: Part) -> bool:
        """True if a retention record gives up payloads of the sync that admitted this shard. If no known record does,
        read the records again: one may have been written since the check began."""
        if not _is_given_up(part.sync, self._payloads):
            self._payloads = given_up_payloads(self._run)
        return _is_given_up(part.sync, self._payloads)


class CompactionCheck:
    """Checks compactions against the shards that sync records admit, and adds the rows of these shards to the
    relations."""

    def __init__(
        self, context: CheckContext, rows: CompactedRows, compactions: Sequence[Compaction], admitted: Admitted
    ):
        self._context, self._findings, self._rows = context, context.findings, rows
        self._compactions, self._admitted = compactions, admitted
        self._listed = context.listed[layout.COMPACTIONS]
        self._places = places(compaction for compaction in compactions if compaction.object in self._listed)

    def holds(self, shard: Shard) -> bool:
        """True if a shard lay in a compaction when the check began."""
        return (shard.key, shard.sha256) in self._places

    def check_objects(self) -> None:
        for compaction in self._compactions:
            counting = [(part, record) for part, record in self._parts(compaction) if self._counts(compaction, part)]
            if counting:
                with self._findings.looking_at(compaction.object):
                    for part, record in counting:
                        table = self._rows.read(Place(compaction, part), record)
                        self._context.relations.add_trajectories(table, sync=record.sync, step=record.step)
            elif compaction.object not in self._listed:
                self._check_lost(compaction)
            if not self._context.is_inherited(compaction.object):
                self._check_admitted(compaction)

    def note_leftovers(self) -> None:
        """Note the objects that a compaction leaves if it is killed, or while it runs. The next compaction removes
        them."""
        listed = self._context.listed[layout.TRAJECTORIES]
        doubled = [shard.key for shard, _ in self._admitted.values() if self.holds(shard) and shard.key in listed]
        if doubled := [key for key in doubled if not self._context.is_inherited(key)]:
            self._findings.note(
                f"{len(doubled)} shards lie in a compaction and are not removed yet, the first is {doubled[0]}"
            )
        counting = {place.compaction.object for place in self._places.values()}
        objects = {key for key in self._listed if not is_record(key)}
        objects.update(compaction.object for compaction in self._compactions)
        for key in sorted(objects - counting):
            if not self._context.is_inherited(key):
                self._findings.note(f"{key} is unfinished, or another compaction has replaced it")

    def _parts(self, compaction: Compaction) -> list[tuple[Part, SyncRecord]]:
        """Return the parts of a compaction whose shards are admitted, each with the sync record that admits its
        shard."""
        parts = (part for part in compaction.parts if part.shard.key in self._admitted)
        return [(part, self._admitted[part.shard.key][1]) for part in parts]

    def _counts(self, compaction: Compaction, part: Part) -> bool:
        """True if readers read an admitted shard from this compaction, and not from one of higher rank."""
        place = self._places.get((part.shard.key, part.shard.sha256))
        return self._is_admitted(part) and place == (compaction, part)

    def _is_admitted(self, part: Part) -> bool:
        """True if a sync record admits the shard exactly as the compaction describes it."""
        return part.shard.key in self._admitted and self._admitted[part.shard.key][0] == part.shard

    def _check_lost(self, compaction: Compaction) -> None:
        """Report the missing object of a compaction if it held shards that lie nowhere else."""
        lost = [
            part.shard
            for part, _ in self._parts(compaction)
            if part.shard.key not in self._context.listed[layout.TRAJECTORIES]
            and not self.holds(part.shard)
            and self._rows.place_now(part.shard, Place(compaction, part)) is None
        ]
        if lost:
            self._findings.report(compaction.object, f"is missing, with {len(lost)} shards, the first is {lost[0].key}")

    def _check_admitted(self, compaction: Compaction) -> None:
        for part in compaction.parts:
            if not self._is_admitted(part) and not self._has_new_record(part.sync):
                self._findings.report(
                    compaction.record, f"holds {part.shard.key}, which no sync record admits as described there"
                )

    def _has_new_record(self, sync: int) -> bool:
        """True if the record of this sync was written after the sync records were listed."""
        key = layout.sync(sync)
        return key not in self._context.listed[layout.SYNCS] and self._context.run.store.exists(key)


def _is_given_up(sync: int, retention: Sequence[RetentionRecord]) -> bool:
    return any(record.payloads.first_sync <= sync <= record.payloads.last_sync for record in retention)
