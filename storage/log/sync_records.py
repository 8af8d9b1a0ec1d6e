"""Sync records: what each sync admitted to the replay buffer. Each record holds the sha256 of the record before it. A
record counts for all attempts, whichever attempt wrote it.

A shard that a retention record gives up stays admitted but is no longer in the replay buffer. `SyncRecord.without`
leaves such shards out.
"""

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from itertools import count, islice, takewhile

from storage import layout
from storage.objects import records
from storage.objects.damage import LookingAt, raising
from storage.objects.records import read_each
from storage.runs.inheritance import ForkedStore
from storage.runs.run import Run
from tba.errors import Damaged, Missing
from tba.types import Version

_FIELDS = ("sync", "step", "attempt", "shards", "rows", "previous_sha256", "refused", "created_at")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A shard as the sync record that admitted it describes it."""

    key: str
    searcher: int
    seq: int
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A shard that was found faulty and will never be read again, and the reason."""

    key: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class SyncRecord:
    sync: int
    step: int  # the gradient step that the sync follows
    attempt: int  # the attempt that wrote the record
    shards: Sequence[Shard]  # in the order (searcher, seq), which is the order of their trajectories
    rows: int
    previous_sha256: str | None  # sha256 of the previous record; None for sync 0
    refused: Sequence[Refusal]
    created_at: str

    def without(self, given_up: Collection[str]) -> "SyncRecord":
        """Return the record without the shards with these keys, as if they had never arrived."""
        kept = [shard for shard in self.shards if shard.key not in given_up]
        return replace(self, shards=kept, rows=sum(shard.rows for shard in kept))


@dataclass(frozen=True)
class StoredRecord:
    record: SyncRecord
    sha256: str  # sha256 of the stored record


def encode(record: SyncRecord) -> bytes:
    return records.encode(asdict(record))


def decode(data: bytes, name: str) -> SyncRecord:
    fields = records.decode(data, name, *_FIELDS)
    with records.reading(name):
        shards = [records.known(Shard, shard) for shard in fields["shards"]]
        refused = [records.known(Refusal, refusal) for refusal in fields["refused"]]
        rows = sum(shard.rows for shard in shards)
        record = records.known(SyncRecord, {field: fields[field] for field in _FIELDS}, shards=shards, refused=refused)
    if rows != record.rows:
        raise Damaged(f"{name} says {record.rows} rows, but its shards have {rows}")
    return record


class Recording:
    """The sync records of the parent, for a fork that replays them. At each gradient step of the fork, those shards
    have arrived that the parent's replay buffer had admitted by the same step."""

    def __init__(self, store: ForkedStore, looking_at: LookingAt | None = None, *, given_up: Collection[str] = ()):
        """`looking_at` decides what happens with a damaged record; by default Damaged is raised."""
        keys = [layout.sync(number) for number in range(store.origin.newest_record + 1)]
        self._records: list[SyncRecord] = []
        for key, read in read_each(store.parent, keys):
            with (looking_at or raising(store.parent.url))(key):
                self._records.append(decode(read(), f"{store.parent.url}/{key}").without(given_up))
        self._steps = {record.sync: record.step for record in self._records}
        self._attempts = store.origin.attempts
        self._entered = 0  # number of records at the start of `_records` whose shards have all been admitted

    def arrivals(self, step: int, admitted: Collection[str]) -> list[Shard]:
        """Return the shards that have arrived by a gradient step, sorted by searcher and seq. Shards in `admitted`,
        named as searcher/seq, are left out. From call to call, `admitted` may only grow."""
        arrived: list[Shard] = []
        for record in islice(self._records, self._entered, None):
            if record.step > step:
                break
            new = [shard for shard in record.shards if f"{shard.searcher}/{shard.seq}" not in admitted]
            self._entered += not (new or arrived)
            arrived += new
        return sorted(arrived, key=lambda shard: (shard.searcher, shard.seq))

    def step_of(self, version: Version) -> int | None:
        """Return the gradient step that a version of the parent follows; None if it is not a version of the parent."""
        return self._steps.get(version.number) if version.attempt <= self._attempts else None

    def steps(self) -> dict[Version, int]:
        """Return, for each version of the parent, the gradient step that it follows."""
        attempts = range(1, self._attempts + 1)
        return {Version(sync, attempt): step for attempt in attempts for sync, step in self._steps.items()}


def read_record(run: Run, sync: int, *, previous_sha256: str | None) -> StoredRecord | None:
    """Return the record of a sync; None if it is not stored. Raise Damaged if it is damaged or if the record before it
    does not have the sha256 `previous_sha256`."""
    name = f"{run.url}/{layout.sync(sync)}"
    try:
        data = run.store.read(layout.sync(sync))
    except Missing:
        return None
    record = _continuing(data, name, sync, previous_sha256)
    return StoredRecord(record, sha256(data).hexdigest())


def named_shards(run: Run) -> set[str]:
    """Return the keys of all shards that sync records admit or refuse. No shard with one of these keys is ever written
    again."""
    return {shard.key for record in read_chain(run) for shard in (*record.shards, *record.refused)}


def read_chain(run: Run) -> list[SyncRecord]:
    """Return the sync records from number 0 up to the first gap. Raise Damaged if a record is damaged or does not hold
    the sha256 of the record before it."""
    stored = {layout.parse_sync(entry.key) for entry in run.store.list(layout.SYNCS)}
    keys = [layout.sync(number) for number in takewhile(stored.__contains__, count())]
    found: list[SyncRecord] = []
    previous: str | None = None
    for sync, (key, data) in enumerate(zip(keys, run.store.read_many(keys), strict=True)):
        found.append(_continuing(data, f"{run.url}/{key}", sync, previous))
        previous = sha256(data).hexdigest()
    return found


def _continuing(data: bytes, name: str, sync: int, previous_sha256: str | None) -> SyncRecord:
    record = decode(data, name)
    if record.sync != sync:
        raise Damaged(f"{name} says it is record {record.sync}")
    if record.previous_sha256 != previous_sha256:
        raise Damaged(f"{name} does not continue record {sync - 1}: it was written after another record {sync - 1}")
    return record
