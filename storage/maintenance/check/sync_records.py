"""Checks the sync records. None may be missing, each must hold the sha256 of the previous record, and no shard may be
admitted twice."""

import hashlib

from storage import layout
from storage.log.sync_records import SyncRecord, decode
from storage.maintenance.check.context import CheckContext
from storage.queries import tables
from storage.queries.tables import fitting
from tba.errors import Damaged


def check_sync_records(context: CheckContext) -> list[SyncRecord]:
    """Check the sync records. Return those that can be read, in order, up to the first gap."""
    findings = context.findings
    found: list[SyncRecord] = []
    admitted: dict[str, str] = {}  # by key of a shard: the key of the record that admits it
    previous: str | None = None
    for number, key in enumerate(context.listed[layout.SYNCS]):
        if key != layout.sync(number):
            findings.report(layout.sync(number), f"is missing, but {key} exists")
            break
        with findings.looking_at(key):
            data = context.records.read(key)
            record = decode(data, key)
            fitting([tables.sync_row(record)], tables.SYNCS)
            _check_fields(context, key, record, found[-1] if found else None)
            if record.previous_sha256 != previous:
                findings.report(key, "has another hash of the previous record: one of the two was changed")
            for shard in record.shards:
                if shard.key in admitted:
                    findings.report(key, f"admits {shard.key}, which {admitted[shard.key]} had admitted already")
                admitted[shard.key] = key
            found.append(record)
            previous = hashlib.sha256(data).hexdigest()
    findings.count("sync records", len(found))
    return found


def _check_fields(context: CheckContext, key: str, record: SyncRecord, before: SyncRecord | None) -> None:
    """Check what a record says about itself and about the shards that it admits."""
    if layout.sync(record.sync) != key:
        raise Damaged(f"is the record of another sync, {record.sync}")
    if before and record.step <= before.step:
        context.findings.report(key, f"follows step {record.step}, not after step {before.step} of the previous record")
    for shard in record.shards:
        fitting([vars(shard)], tables.SHARDS)
        if layout.parse_shard(shard.key) != (shard.searcher, shard.seq):
            raise Damaged(f"admits {shard.key!r}, which is not the name of a shard of searcher {shard.searcher}")
