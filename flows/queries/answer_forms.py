"""Write the rows of an answer as a table, CSV, JSON or Parquet. Rows are written in parts, so that they need not all
fit into memory."""

import csv as csv_files
import io
import json
import math
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb

from flows.queries.statements import with_texts_cut

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS = 100  # maximum rows of a table on the screen
_MOST_ON_SCREEN = 5_000  # maximum characters of a value that are rendered; a terminal shows only the beginning
_AT_A_TIME = 64  # rows that are converted to Python objects at a time
_PIECE = 1 << 16  # characters that are collected before they are written
_BATCH = 2_048  # rows that DuckDB returns at a time
_GROUP = 65_536  # maximum rows of a Parquet row group
_GROUP_BYTES = 64_000_000  # approximate maximum size of a row group in memory


def table(rows: duckdb.DuckDBPyRelation, width: int) -> Iterator[str]:
    """Yield a table for a screen of this width. Of many rows, the table shows the first and the last; of long texts,
    the beginning. Yield the plan of an `explain` statement as plain text."""
    if rows.columns in (["explain_key", "explain_value"], ["analyzed_plan"]):
        yield "\n".join(text for _, text in rows.fetchall()) + "\n"
        return
    with redirect_stdout(io.StringIO()) as out:
        with_texts_cut(rows, _MOST_ON_SCREEN).show(max_rows=_ROWS, max_width=width)
    yield out.getvalue()


def csv(rows: duckdb.DuckDBPyRelation) -> Iterator[str]:
    out = io.StringIO()
    writer = csv_files.writer(out, lineterminator="\n")
    writer.writerow(rows.columns)
    for row in _rows(rows):
        writer.writerow(
            [json.dumps(cell) if isinstance(cell, list | dict | bool) else cell for cell in map(_plain, row)]
        )
        if out.tell() >= _PIECE:
            yield out.getvalue()
            out.seek(0)
            out.truncate()
    yield out.getvalue()


def json_rows(rows: duckdb.DuckDBPyRelation) -> Iterator[str]:
    """Yield a JSON list with one object per line."""
    names, first, text = rows.columns, True, ""
    for row in _rows(rows):
        text += "[\n" if first else ",\n"
        first = False
        text += json.dumps(dict(zip(names, map(_plain, row), strict=True)), ensure_ascii=False)
        if len(text) >= _PIECE:
            yield text
            text = ""
    yield f"{text}{'[]' if first else chr(10) + ']'}\n"


def _rows(rows: duckdb.DuckDBPyRelation) -> Iterator[tuple[Any, ...]]:
    while some := rows.fetchmany(_AT_A_TIME):
        yield from some


def parquet(rows: duckdb.DuckDBPyRelation, path: Path, *, each: Callable[[], None] = lambda: None) -> int:
    """Write the rows to a new Parquet file, and return the number of rows. Call `each` before every row group."""
    import pyarrow.parquet as pq

    batches, count = rows.to_arrow_reader(_BATCH), 0
    with path.open("xb") as file, pq.ParquetWriter(file, batches.schema, compression="zstd") as writer:
        for group in _groups(batches):
            each()
            writer.write_table(group)
            count += group.num_rows
    return count


def _groups(batches: "pa.RecordBatchReader") -> Iterator["pa.Table"]:
    """Yield the rows as tables of about `_GROUP` rows each, or of fewer rows if these reach `_GROUP_BYTES`."""
    import pyarrow as pa

    held: list[pa.RecordBatch] = []
    for batch in batches:
        held.append(batch)
        if sum(it.num_rows for it in held) >= _GROUP or sum(it.nbytes for it in held) >= _GROUP_BYTES:
            yield pa.Table.from_batches(held)
            held = []
    if held:
        yield pa.Table.from_batches(held)


def _plain(value: Any) -> Any:
    """Convert a value to one that JSON has. A float that is not finite becomes null."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value)
