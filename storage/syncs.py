"""Sync records: what each sync admitted to the replay buffer, chained by hash. Whoever wrote one, it is a fact."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256

from storage import layout, records
from storage.run import Run
from tba.errors import Damaged, Missing

_FIELDS = ("sync", "step", "attempt", "shards", "rows", "previous_sha256", "refused", "created_at")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A shard as the record that admits it found it."""

    key: str
    searcher: int
    seq: int
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A shard that was looked at once and never will be again."""

    key: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class SyncRecord:
    sync: int
    step: int  # that it follows
    attempt: int  # of the trainer that wrote it
    shards: Sequence[Shard]  # in the order (searcher, seq), which is the order of their trajectories
    rows: int
    previous_sha256: str | None  # of the bytes of the record before; None for sync 0
    refused: Sequence[Refusal]
    created_at: str


@dataclass(frozen=True)
class StoredRecord:
    record: SyncRecord
    sha256: str  # of its bytes


def encode(record: SyncRecord) -> bytes:
    return records.encode(asdict(record))


def decode(data: bytes, name: str) -> SyncRecord:
    fields = records.decode(data, name, *_FIELDS)
    with records.reading(name):
        shards = [Shard(**shard) for shard in fields["shards"]]
        refused = [Refusal(**refusal) for refusal in fields["refused"]]
        rows = sum(shard.rows for shard in shards)
    record = SyncRecord(**{field: fields[field] for field in _FIELDS} | {"shards": shards, "refused": refused})
    if rows != record.rows:
        raise Damaged(f"{name} says {record.rows} rows, but its shards have {rows}")
    return record


def read_record(run: Run, sync: int, *, previous_sha256: str | None) -> StoredRecord | None:
    """A record that continues the chain; None if it is not there, Damaged if it does not fit."""
    name = f"{run.url}/{layout.sync(sync)}"
    try:
        data = run.store.read(layout.sync(sync))
    except Missing:
        return None
    record = decode(data, name)
    if record.sync != sync:
        raise Damaged(f"{name} says it is record {record.sync}")
    if record.previous_sha256 != previous_sha256:
        raise Damaged(f"{name} does not continue record {sync - 1}: it was written after one with other content")
    return StoredRecord(record, sha256(data).hexdigest())
