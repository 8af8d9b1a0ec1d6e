"""Makes the tables of evaluations: one row per score, and one row per example."""

import math
from collections.abc import Callable, Iterable, Sequence

import pyarrow as pa

from storage import layout
from storage.objects import records
from storage.objects.damage import DamageLog
from storage.queries.mirror import Snapshot
from storage.queries.tables import TIME, Record, Row, named, rows_of, time_of
from storage.runs.attempts import Span, stands
from storage.weights.evaluations import EXAMPLE, examples_in
from tba.types import Version

EVALUATIONS = pa.schema(
    {
        "version": pa.int32(), "attempt": pa.int32(), "step": pa.int32(), "metric": pa.string(),
        "value": pa.float64(), "n": pa.int64(), "temperature": pa.float64(), "top_p": pa.float64(),
        "seconds": pa.float64(), "abandoned": pa.bool_(), "created_at": TIME,
    }
)  # fmt: skip
EXAMPLES = pa.schema(
    {
        "version": pa.int32(), "attempt": pa.int32(), "step": pa.int32(), "prompt_id": pa.string(),
        "prompt": pa.string(), "response": pa.string(), "answer": pa.string(), "reward": pa.float64(),
        "abandoned": pa.bool_(),
    }
)  # fmt: skip


def score_rows(record: Record, _: str) -> list[Row]:
    return [
        {
            **{field: record[field] for field in ("version", "attempt", "step")},
            **{field: score[field] for field in ("metric", "value", "n", "seconds")},
            **{field: score.get(field) for field in ("temperature", "top_p")},
            "created_at": time_of(record["created_at"]),
        }
        for score in record["scores"]
    ]


def example_rows(record: Record, name: str) -> list[Row]:
    return [
        {
            "version": it.version.number,
            "attempt": it.version.attempt,
            "step": it.step,
            **{field: getattr(it, field) for field in EXAMPLE},
            "reward": it.reward if math.isfinite(it.reward) else None,
        }
        for it in examples_in(record, name)
    ]


def evaluations(snapshot: Snapshot, spans: Sequence[Span], damage: DamageLog) -> pa.Table:
    return _table(snapshot, EVALUATIONS, spans, damage, score_rows)


def examples(snapshot: Snapshot, spans: Sequence[Span], damage: DamageLog) -> pa.Table:
    return _table(snapshot, EXAMPLES, spans, damage, example_rows)


def _table(
    snapshot: Snapshot,
    schema: pa.Schema,
    spans: Sequence[Span],
    damage: DamageLog,
    rows_in: Callable[[Record, str], list[Row]],
) -> pa.Table:
    """Return a table of the rows that `rows_in` makes of each record, which it gets with the record's name."""

    def decode(key: str, record: Record) -> Iterable[Row]:
        own = Version(*records.integers(record, "version", "attempt"))
        return named(key, layout.evaluation(own), rows_in(record, key))

    rows = rows_of(snapshot, layout.EVALUATIONS, schema, damage, decode)
    for row in rows:
        row["abandoned"] = not stands(spans, Version(row["version"], row["attempt"]))
    return pa.Table.from_pylist(rows, schema)
