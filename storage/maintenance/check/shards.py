"""Checks the shards of trajectories: admitted ones, stored alone or in a compaction, and those that no sync record has
admitted yet."""

import hashlib
from collections.abc import Collection, Sequence

import pyarrow as pa

from storage import layout
from storage.log.shard_checks import read_shard
from storage.log.sync_records import Shard, SyncRecord
from storage.maintenance.check.compactions import CompactedRows, CompactionCheck, read_compactions
from storage.maintenance.check.context import CheckContext
from storage.runs.retention import RetentionRecord
from tba.errors import Damaged, Missing


def check_shards(
    context: CheckContext,
    sync_records: Sequence[SyncRecord],
    *,
    lost: Collection[str],
    payloads: Sequence[RetentionRecord],
) -> None:
    """Check each shard by itself and against its sync record, whether it is an object of its own or lies in a
    compaction. `lost` has the keys of admitted shards that were given up; `payloads` has the retention records that
    give up payloads. Add what the sync records say about shards, and all rows, to the relations."""
    findings, relations = context.findings, context.relations
    admitted = {shard.key: (shard, record) for record in sync_records for shard in record.shards}
    rows = CompactedRows(context, payloads)
    compactions = CompactionCheck(context, rows, read_compactions(context), admitted)
    for shard, record in admitted.values():
        relations.add_shard(shard.searcher, shard.seq, shard.rows, sync=record.sync, step=record.step)
        if shard.key in lost:
            findings.note(f"{shard.key} was lost and is given up")
        elif not compactions.holds(shard):
            with findings.looking_at(shard.key):
                table = _read_admitted(context, rows, shard, record)
                relations.add_trajectories(table, sync=record.sync, step=record.step)
    compactions.check_objects()
    findings.count("shards", len(admitted))
    compactions.note_leftovers()
    check_waiting_shards(context, rows, sync_records)
    findings.count("trajectories", relations.count("trajectories"))


def check_waiting_shards(context: CheckContext, rows: CompactedRows, sync_records: Sequence[SyncRecord]) -> None:
    """Check the shards that no sync record names, and note those that a sync record has refused."""
    refused = {refusal.key: refusal.reason for record in sync_records for refusal in record.refused}
    spoken_of = {shard.key for record in sync_records for shard in record.shards} | refused.keys()
    for key, reason in refused.items():
        context.findings.note(f"{key} was refused: {reason}")
    shards = trajectories = 0
    for key in context.listed[layout.TRAJECTORIES]:
        if key not in spoken_of:
            with context.findings.looking_at(key):
                if (data := _read_waiting(context, rows, key)) is None:
                    continue
                table = read_shard(context.run.writer_of(key), key, data)
                context.relations.add_trajectories(table, sync=None, step=None)
                shards, trajectories = shards + 1, trajectories + len(table)
    if shards:
        context.findings.note(f"{shards} shards with {trajectories} trajectories have arrived since the last sync")


def _read_admitted(context: CheckContext, rows: CompactedRows, shard: Shard, record: SyncRecord) -> pa.Table:
    """Return the rows of a shard that had not been compacted into a larger object when the check began. It may have
    been since. Raise Missing or Damaged if the shard does not match its sync record."""
    try:
        data = context.reading.read(shard.key)
    except Missing:
        if (place := rows.place_now(shard, None)) is None:
            raise
        return rows.read(place, record)
    if len(data) != shard.bytes:
        raise Damaged(f"has {len(data)} bytes, but its record says {shard.bytes}")
    if hashlib.sha256(data).hexdigest() != shard.sha256:
        raise Damaged("does not have the content that was admitted (sha256 differs)")
    table = read_shard(context.run.writer_of(shard.key), shard.key, data)
    if table.num_rows != shard.rows:
        raise Damaged(f"has {table.num_rows} rows, but its record says {shard.rows}")
    return table


def _read_waiting(context: CheckContext, rows: CompactedRows, key: str) -> bytes | None:
    """Return the bytes of a shard that no sync record named when the check began. Return None if it has been admitted
    and compacted since then."""
    try:
        return context.reading.read(key)
    except Missing:
        if rows.has_taken_in(key):
            return None
        raise
