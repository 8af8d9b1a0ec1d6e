"""The columns of a shard, and the conversion of trajectories to columns.

A shard is one Parquet object: the trajectories of one append, sorted by prompt, round and slot. Its metadata names the
run, the searcher and the sequence number, so a shard that was moved or copied from elsewhere is recognised. A task may
add columns to its shards; readers keep them.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tba.errors import DataError
from tba.fetched import Lists
from tba.types import Trajectory

SCHEMA_VERSION = 1

_INTEGERS = pa.list_(pa.field("element", pa.int32()))
_NUMBERS = pa.list_(pa.field("element", pa.float32()))
_MASK = pa.list_(pa.field("element", pa.bool_()))

TRAJECTORY_SCHEMA = pa.schema(
    {
        "trajectory_id": pa.string(),  # searcher/seq/row
        "searcher": pa.int32(),
        "round": pa.int32(),
        "slot": pa.int32(),
        "version_start": pa.int32(),
        "version_start_attempt": pa.int32(),
        "version_end": pa.int32(),
        "version_end_attempt": pa.int32(),
        "prompt_id": pa.string(),
        "group_id": pa.string(),
        "prompt": pa.string(),
        "response": pa.string(),
        "prompt_tokens": _INTEGERS,
        "response_tokens": _INTEGERS,
        "behaviour_logps": _NUMBERS,
        "ref_logps": _NUMBERS,  # null in all rows of a shard if the run does not compute them
        "loss_mask": _MASK,  # null if the policy wrote every token
        "step_ends": _INTEGERS,  # null, like step_values, if no values were estimated
        "step_values": _NUMBERS,
        "reference_version": pa.int32(),
        "reference_version_attempt": pa.int32(),
        "reward": pa.float64(),
        "reward_parts": pa.map_(pa.string(), pa.float64()),
        "finished": pa.bool_(),
        "length": pa.int32(),
        "temperature": pa.float64(),
        "top_p": pa.float64(),
        "seed": pa.int64(),
        "content_hash": pa.string(),  # of prompt_id and response_tokens: see sampling.copies
        "created_at": pa.timestamp("us", tz="UTC"),
        "generate_seconds": pa.float64(),
        "schema_version": pa.int32(),
    }
)
LATER = ("loss_mask", "step_ends", "step_values")
"""Columns that shards of version 0.1.0 do not have. They may be null."""

_AS_THEY_ARE = (
    "trajectory_id", "searcher", "round", "slot", "prompt_id", "group_id", "prompt", "response", "reward", "finished",
    "temperature", "top_p", "seed", "created_at", "generate_seconds", *LATER,
)  # fmt: skip
_LISTS = {"prompt_tokens": "i", "response_tokens": "i", "behaviour_logps": "f", "ref_logps": "f"}
"""Columns of lists, each with the `struct` format of its elements."""
VERSIONS = ("version_start", "version_end", "reference_version")
"""Columns of versions. The attempt of each version is in another column, `..._attempt`."""
_FLOATS = ["behaviour_logps.list.element", "ref_logps.list.element"]
_REPETITIVE = ["group_id", "prompt_id", "prompt", "reward_parts.key_value.key"]
_SCALARS = [field.name for field in TRAJECTORY_SCHEMA if pa.types.is_primitive(field.type)] + ["prompt_id"]
"""Columns for which statistics are stored, because queries choose rows by them. Statistics of text and lists would
only make a shard larger."""


def trajectory_ids(searcher: int, seq: int, rows: int) -> list[str]:
    return [f"{searcher}/{seq}/{row}" for row in range(rows)]


def content_hash(prompt_id: str, response_tokens: Sequence[int]) -> str:
    """Return the hash of a trajectory's content: its prompt and its response. It is the md5, in hexadecimal, of the
    prompt's id, a line feed, and the response's tokens as little-endian 32-bit integers."""
    return _content_hash(prompt_id, np.array(response_tokens, dtype="<i4"))


def _content_hash(prompt_id: str, tokens_T: np.ndarray) -> str:
    return hashlib.md5(prompt_id.encode() + b"\n" + tokens_T.tobytes(), usedforsecurity=False).hexdigest()


def content_hashes(columns: Mapping[str, pa.Array]) -> list[str]:
    """Compute the content hash of each row from the columns `prompt_id` and `response_tokens`."""
    tokens = flat(columns["response_tokens"])
    tokens_N, ends_B = np.asarray(tokens.elements_N, dtype="<i4"), np.cumsum(tokens.lengths_B)
    spans = zip(columns["prompt_id"].to_pylist(), pairwise([0, *ends_B.tolist()]), strict=True)
    return [_content_hash(prompt_id, tokens_N[start:end]) for prompt_id, (start, end) in spans]


def to_table(trajectories: Sequence[Trajectory], *, run: str, searcher: int, seq: int) -> pa.Table:
    """Return the table of a shard. Rows are sorted and get new `trajectory_id`s. Raise DataError, naming the column, if
    a column cannot hold its values."""
    ordered = sorted(trajectories, key=lambda t: (t.prompt_id, t.round, t.slot))
    columns: dict[str, Any] = {name: [getattr(t, name) for t in ordered] for name in (*_AS_THEY_ARE, *_LISTS)}
    for name in VERSIONS:
        columns[name] = [getattr(t, name).number for t in ordered]
        columns[f"{name}_attempt"] = [getattr(t, name).attempt for t in ordered]
    columns["trajectory_id"] = trajectory_ids(searcher, seq, len(ordered))
    columns["length"] = [t.length for t in ordered]
    columns["reward_parts"] = [list(t.reward_parts.items()) for t in ordered]
    columns["schema_version"] = [SCHEMA_VERSION] * len(ordered)
    arrays = {name: _column(TRAJECTORY_SCHEMA.field(name), values) for name, values in columns.items()}
    arrays["content_hash"] = pa.array(content_hashes(arrays))
    schema = TRAJECTORY_SCHEMA.with_metadata(_metadata(run, searcher, seq))
    return pa.Table.from_arrays([arrays[name] for name in schema.names], schema=schema)


def _column(field: pa.Field, values: Sequence[Any]) -> pa.Array:
    try:
        packs = field.name in _LISTS and None not in values
        return _lists(field, values) if packs else pa.array(values, field.type)
    except (pa.ArrowException, struct.error, OverflowError, TypeError, ValueError) as error:
        raise DataError(f"column {field.name!r} cannot hold its values ({str(error).splitlines()[0]})") from None


def _lists(field: pa.Field, values: Sequence[Sequence[float]]) -> pa.Array:
    """Return a column of lists. The result is that of `pa.array`, but is made in a third of the time."""
    ends_B = np.cumsum([len(value) for value in values], dtype="<i4")
    elements = struct.pack(f"<{ends_B[-1]}{_LISTS[field.name]}", *chain.from_iterable(values))
    starts = pa.py_buffer(np.concatenate([np.zeros(1, "<i4"), ends_B]))
    numbers = pa.Array.from_buffers(field.type.value_type, int(ends_B[-1]), [None, pa.py_buffer(elements)])
    return pa.Array.from_buffers(field.type, len(values), [None, starts], children=[numbers])


ENCODING: dict[str, Any] = {
    "row_group_size": 256,  # a smaller row group is read faster, but the object gets larger and slower to write
    "compression": "zstd",
    "compression_level": 1,
    "use_dictionary": _REPETITIVE,
    # Only for floats: DuckDB cannot read other columns with this encoding.
    "column_encoding": dict.fromkeys(_FLOATS, "BYTE_STREAM_SPLIT"),
    "write_statistics": _SCALARS,
    "write_page_checksum": True,
}
"""Arguments of pyarrow's `write_table` for a shard."""


def encode(table: pa.Table) -> bytes:
    """Return the bytes of a shard. The same table gives the same bytes."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, **ENCODING)
    return sink.getvalue().to_pybytes()


UNREADABLE = (pa.ArrowException, OSError, ValueError, LookupError, ArithmeticError, TypeError)
"""Errors that pyarrow and Python raise when they decode damaged bytes."""


def decode(data: bytes, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the table in the bytes of a shard, or only these columns of it. Raise one of `UNREADABLE` if the bytes are
    damaged."""
    file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
    table = file.read(list(columns) if columns else None, use_threads=False)
    if len(table) != file.metadata.num_rows:  # the checksums cover the pages but not the metadata
        raise ValueError(f"it has {len(table)} rows, but its metadata says {file.metadata.num_rows}")
    return with_later(table, columns or TRAJECTORY_SCHEMA.names)


def with_later(table: pa.Table, columns: Sequence[str] = TRAJECTORY_SCHEMA.names) -> pa.Table:
    """Return the table with all columns of `LATER` that are among `columns`. Those that did not exist yet when the rows
    were stored are filled with nulls."""
    for field in (TRAJECTORY_SCHEMA.field(name) for name in LATER if name in columns):
        if field.name not in table.column_names:
            table = table.append_column(field, pa.nulls(len(table), field.type))
    return table


def _metadata(run: str, searcher: int, seq: int) -> dict[str, str]:
    return {"run": run, "searcher": str(searcher), "seq": str(seq), "schema_version": str(SCHEMA_VERSION)}


def expected_metadata(run: str, searcher: int, seq: int) -> dict[bytes, bytes]:
    """Return the metadata that a shard of this name must have."""
    return {key.encode(): value.encode() for key, value in _metadata(run, searcher, seq).items()}


def flat(column: pa.ChunkedArray | pa.Array) -> Lists:
    """Return a column of lists as flat elements and lengths. A null counts as an empty list."""
    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return Lists(whole.flatten().to_numpy(), whole.value_lengths().fill_null(0).to_numpy().astype(np.int64))


COLUMNS = ("prompt_id", "content_hash", "reward", "length", "finished", "version_start", "version_start_attempt")
"""Columns of a shard from which the replay buffer's index is made."""
