"""The ledger: what each gradient step drew, found and measured. Two objects per sync and attempt."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from storage import layout, parquet
from storage.records import reading
from storage.run import Run
from tba.errors import AlreadyExists, Superseded
from tba.types import StepRecord

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
"""Columns of draws that ledgers of 0.1.0 do not have."""

_STEP = (
    ("step", pa.int32()),
    ("sync", pa.int32()),
    ("attempt", pa.int32()),
    ("version", pa.int32()),
    ("version_attempt", pa.int32()),
)
_LAST = (("weights_sha256", pa.string()), ("created_at", pa.timestamp("us", tz="UTC")))

NO_METRICS = tuple(name for name, _ in (*_STEP, *_LAST))
"""Columns of steps that were not measured."""


class ParquetLedger:
    """The `Ledger` of one attempt."""

    def __init__(self, run: Run, attempt: int):
        self.run, self.attempt = run, attempt

    def write(self, sync: int, records: Sequence[StepRecord], *, weights_sha256: str) -> None:
        """Draws first, steps last: where the steps are, the ledger of the sync is whole."""
        _check(sync, records)
        self._create(layout.draws(sync, self.attempt), _draws(records))
        self._create(layout.steps(sync, self.attempt), self._steps(records, weights_sha256))

    def _steps(self, records: Sequence[StepRecord], weights_sha256: str) -> pa.Table:
        """One column per metric that any of the steps measured; null where a step did not."""
        taken = {name for name, _ in (*_STEP, *_LAST)}
        names = sorted({name for record in records for name in record.metrics} - taken)
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

    def _create(self, key: str, table: pa.Table) -> None:
        data = parquet.encode(table)
        try:
            self.run.store.create(key, data)
        except AlreadyExists:
            if self.run.store.read(key) != data:
                raise Superseded(
                    f"{self.run.url}/{key} holds something else: another trainer is attempt {self.attempt} too"
                ) from None


@dataclass(frozen=True)
class Entry:
    """What the ledger says of one step, as rows by column."""

    step: dict[str, Any]
    draws: list[dict[str, Any]]  # in the order of slots and positions


def read_entries(run: Run, sync: int, attempt: int) -> list[Entry]:
    """The steps that a sync closed, in order. Missing if that attempt has not stored it."""
    steps, draws = layout.steps(sync, attempt), layout.draws(sync, attempt)
    drawn = parquet.decode(run.store.read(draws), f"{run.url}/{draws}", DRAWS_SCHEMA, later=LATER).to_pylist()
    drawn.sort(key=lambda row: (row["step"], row["slot"], row["position"]))
    with reading(name := f"{run.url}/{steps}"):
        found = parquet.decode(run.store.read(steps), name).to_pylist()
        found.sort(key=lambda row: row["step"])
        return [Entry(row, [draw for draw in drawn if draw["step"] == row["step"]]) for row in found]


def _draws(records: Sequence[StepRecord]) -> pa.Table:
    rows = [
        {**asdict(draw), **asdict(outcome)}
        for record in records
        for draw, outcome in zip(record.draws, record.outcomes, strict=True)
    ]
    return pa.Table.from_pylist(rows, schema=DRAWS_SCHEMA)


def _check(sync: int, records: Sequence[StepRecord]) -> None:
    """What the trainer promises: whole consecutive steps of this sync, outcomes in the order of the draws."""
    if not records:
        raise ValueError(f"sync {sync} closes no step")
    first = records[0].step
    if [record.step for record in records] != list(range(first, first + len(records))):
        raise ValueError(f"sync {sync}: steps must follow each other, got {[record.step for record in records]}")
    for record in records:
        if record.sync != sync:
            raise ValueError(f"step {record.step} belongs to sync {record.sync}, not {sync}")
        drawn = [(draw.step, draw.slot, draw.position) for draw in record.draws]
        if drawn != [(record.step, outcome.slot, outcome.position) for outcome in record.outcomes]:
            raise ValueError(f"step {record.step}: outcomes must be in the order of the draws")
