"""The ledger: what each gradient step drew, computed and measured.

For each sync of an attempt, the ledger has three objects: the draws, the steps, and a ledger record with the digests of
both. Each ledger record also holds the digest of the previous sync's ledger record, so a record that was replaced is
noticed.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

import pyarrow as pa

from storage import layout
from storage.objects import parquet, records
from storage.objects.digests import Digest
from storage.objects.records import reading
from storage.runs.attempts import read_attempt
from storage.runs.run import Run
from tba.errors import AlreadyExists, Damaged, Missing, Superseded
from tba.types import StepRecord, Version

DRAWS_SCHEMA = pa.schema(
    {
        "step": pa.int32(),
        "slot": pa.int32(),
        "position": pa.int32(),
        "trajectory_id": pa.string(),
        "prompt_id": pa.string(),
        "branch": pa.string(),
        "weight": pa.float64(),
        "age": pa.int32(),
        "residual": pa.float64(),
        "log_z": pa.float64(),
        "logp": pa.float64(),
        "ref_logp": pa.float64(),
        "advantage": pa.float64(),
    }
)
LATER = ("advantage",)
"""Columns of draws that ledgers of version 0.1.0 do not have."""

_STEP = (
    ("step", pa.int32()),
    ("sync", pa.int32()),
    ("attempt", pa.int32()),
    ("version", pa.int32()),
    ("version_attempt", pa.int32()),
)
_LAST = (("weights_sha256", pa.string()), ("created_at", pa.timestamp("us", tz="UTC")))

SIDE_BY_SIDE = 16
"""Number of syncs whose ledger is read at the same time."""

NO_METRICS = tuple(name for name, _ in (*_STEP, *_LAST))
"""The columns of the steps that are not metrics."""


class ParquetLedger:
    """Writes the ledger of one attempt; see `Ledger` in tba/interfaces.py."""

    def __init__(self, run: Run, attempt: int):
        self.run, self.attempt = run, attempt
        self._newest: LedgerLink | None = None  # the record that this attempt wrote last
        self._unfinished: dict[int, dict[str, bytes]] = {}  # by sync, the objects that are being stored

    def write(self, sync: int, steps: Sequence[StepRecord], *, weights_sha256: str) -> None:
        """Write the draws, then the steps, and last the ledger record, which has the digests of both. So if the ledger
        record of a sync exists, the ledger of the sync is complete."""
        _check(sync, steps)
        if sync not in self._unfinished:
            self._unfinished = {sync: self._encoded(sync, steps, weights_sha256)}
        objects = self._unfinished[sync]
        for key, data in objects.items():
            self._create(key, data)
        self._newest = LedgerLink(sync, self.attempt, sha256(objects[layout.ledger(sync, self.attempt)]).hexdigest())
        self._unfinished = {}

    def _encoded(self, sync: int, steps: Sequence[StepRecord], weights_sha256: str) -> dict[str, bytes]:
        """Return the draws, the steps and the ledger record by key, in the order in which they must be stored. They
        contain the current time, so a retry after a failure must store the same bytes again."""
        draws = parquet.encode(_draws(steps))
        measured = parquet.encode(self._steps(steps, weights_sha256))
        record = LedgerRecord(
            sync=sync,
            attempt=self.attempt,
            draws=Digest.of(draws),
            steps=Digest.of(measured),
            previous=self._newest or _last_of_others(self.run, self.attempt),
            created_at=records.now(),
        )
        return {
            layout.draws(sync, self.attempt): draws,
            layout.steps(sync, self.attempt): measured,
            layout.ledger(sync, self.attempt): record.encode(),
        }

    def _steps(self, records: Sequence[StepRecord], weights_sha256: str) -> pa.Table:
        """Return a table with one row per step, and one column per metric that any of the steps measured. A metric is
        null for the steps that did not measure it."""
        names = sorted({name for record in records for name in record.metrics} - {*NO_METRICS})
        now = datetime.now(UTC)
        columns = {
            "step": [record.step for record in records],
            "sync": [record.sync for record in records],
            "attempt": [self.attempt] * len(records),
            "version": [record.version.number for record in records],
            "version_attempt": [record.version.attempt for record in records],
            **{name: [record.metrics.get(name) for record in records] for name in names},
            "weights_sha256": [None] * (len(records) - 1) + [weights_sha256],
            "created_at": [now] * len(records),
        }
        return pa.table(columns, schema=pa.schema([*_STEP, *((name, pa.float64()) for name in names), *_LAST]))

    def _create(self, key: str, data: bytes) -> None:
        try:
            self.run.store.create(key, data)
        except AlreadyExists:
            if self.run.store.read(key) != data:
                raise Superseded(
                    f"{self.run.url}/{key} has other content: another trainer writes under attempt {self.attempt} too"
                ) from None


@dataclass(frozen=True)
class LedgerLink:
    """Identifies a ledger record by its sync, attempt and sha256. The next ledger record holds this link."""

    sync: int
    attempt: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class LedgerRecord:
    """The record with the digests of the draws and the steps of one sync of an attempt."""

    sync: int
    attempt: int
    draws: Digest
    steps: Digest
    previous: LedgerLink | None  # None for the first sync, and if the ledger before it has no record, as in older runs
    created_at: str

    def encode(self) -> bytes:
        digests = {"draws": self.draws.encode(), "steps": self.steps.encode()}
        previous = asdict(self.previous) if self.previous else None
        return records.encode(
            {
                "sync": self.sync,
                "attempt": self.attempt,
                **digests,
                "previous": previous,
                "created_at": self.created_at,
            }
        )

    @classmethod
    def decode(cls, data: bytes, name: str) -> "LedgerRecord":
        said = records.decode(data, name, "sync", "attempt", "draws", "steps", "previous", "created_at")
        with reading(name):
            previous = records.known(LedgerLink, said["previous"]) if said["previous"] else None
            draws, steps = (Digest.decode(said[part]) for part in ("draws", "steps"))
            return records.known(cls, said, draws=draws, steps=steps, previous=previous)


def read_ledger_record(run: Run, sync: int, attempt: int) -> LedgerRecord | None:
    """Return the ledger record of a sync; None if there is none, as in older runs."""
    key = layout.ledger(sync, attempt)
    try:
        return LedgerRecord.decode(run.store.read(key), f"{run.url}/{key}")
    except Missing:
        return None


def find_faults(run: Run, names: Sequence[Version]) -> Iterator[str]:
    """Yield an error message for each of these syncs whose draws or steps are missing or do not match their ledger
    record. A sync without a ledger record, as in older runs, is not checked."""
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        yield from filter(None, pool.map(lambda name: _fault(run, name), names))


def _fault(run: Run, name: Version) -> str:
    try:
        if record := read_ledger_record(run, *name):
            for key, digest in ((layout.draws(*name), record.draws), (layout.steps(*name), record.steps)):
                digest.verify(run.store.read(key), key)
    except (Missing, Damaged) as error:
        return str(error)
    return ""


def _last_of_others(run: Run, attempt: int) -> LedgerLink | None:
    """Return a link to the ledger record of the sync whose checkpoint `attempt` continues. Return None if the attempt
    starts from the beginning, or if that sync has no ledger record."""
    origin = read_attempt(run, attempt).continues if run.store.exists(layout.attempt(attempt)) else None
    if origin is None:
        return None
    try:
        data = run.store.read(layout.ledger(*origin))
    except Missing:
        return None
    return LedgerLink(*origin, sha256(data).hexdigest())


@dataclass(frozen=True)
class Entry:
    """The rows of the ledger for one gradient step. Each row is a dict by column."""

    step: dict[str, Any]
    draws: list[dict[str, Any]]  # in the order of slots and positions


def read_entries(run: Run, sync: int, attempt: int) -> list[Entry]:
    """Return the steps between the previous sync and this sync, in order, each with its draws. Raise Missing if this
    attempt has not stored the ledger of the sync. Raise Damaged if the steps or the draws do not match the ledger
    record."""
    steps, draws = f"{run.url}/{layout.steps(sync, attempt)}", f"{run.url}/{layout.draws(sync, attempt)}"
    measured, data = run.store.read(layout.steps(sync, attempt)), run.store.read(layout.draws(sync, attempt))
    if record := read_ledger_record(run, sync, attempt):
        record.steps.verify(measured, steps)
        record.draws.verify(data, draws)
    drawn = parquet.decode(data, draws, DRAWS_SCHEMA, later=LATER).to_pylist()
    drawn.sort(key=lambda row: (row["step"], row["slot"], row["position"]))
    with reading(steps):
        rows = parquet.decode(measured, steps).to_pylist()
        rows.sort(key=lambda row: row["step"])
        return [Entry(row, [draw for draw in drawn if draw["step"] == row["step"]]) for row in rows]


def _draws(records: Sequence[StepRecord]) -> pa.Table:
    rows = [
        {**asdict(draw), **asdict(outcome)}
        for record in records
        for draw, outcome in zip(record.draws, record.outcomes, strict=True)
    ]
    return pa.Table.from_pylist(rows, schema=DRAWS_SCHEMA)


def _check(sync: int, records: Sequence[StepRecord]) -> None:
    """Raise ValueError unless the records are those of consecutive steps, all of this sync, each with its outcomes in
    the order of its draws."""
    if not records:
        raise ValueError(f"sync {sync} closes no step")
    first = records[0].step
    if [record.step for record in records] != list(range(first, first + len(records))):
        raise ValueError(f"sync {sync}: steps must be consecutive, got {[record.step for record in records]}")
    for record in records:
        if record.sync != sync:
            raise ValueError(f"step {record.step} belongs to sync {record.sync}, not {sync}")
        drawn = [(draw.step, draw.slot, draw.position) for draw in record.draws]
        if drawn != [(record.step, outcome.slot, outcome.position) for outcome in record.outcomes]:
            raise ValueError(f"step {record.step}: outcomes must be in the order of the draws")
