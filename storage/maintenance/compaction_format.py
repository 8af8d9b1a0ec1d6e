"""The format of a compaction's object. The object holds the rows of its shards. Its metadata holds the fields that the
record of the compaction will have."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage import layout
from storage.log.compactions import COLUMNS, FACTS, Compaction, Part, encode, understood
from storage.log.schema import ENCODING, TRAJECTORY_SCHEMA, UNREADABLE
from storage.log.sync_records import Shard
from storage.objects import records
from tba.errors import Damaged

ROWS = 1024
"""Maximum number of rows in a row group. A shard has few row groups, because each of them costs time in every query."""

_COMPUTED = ("version_step", "age")  # columns that only the view of trajectories has
_TAKEN = {name.lower() for name in (*COLUMNS.names, *_COMPUTED)}
_OPTIONS = {name: value for name, value in ENCODING.items() if name != "row_group_size"}
_STATISTICS = [*FACTS, *_OPTIONS["write_statistics"]]


class Admitted(NamedTuple):
    """A shard, with the sync that admits it and the gradient step that this sync follows."""

    shard: Shard
    sync: int
    step: int


def misfit(table: pa.Table, others: Sequence[pa.Table]) -> str:
    """Return why the columns that a task has added to a shard cannot be stored with those of the shards `others`.
    Return an empty string if they can."""
    added = [name for name in table.column_names if name not in TRAJECTORY_SCHEMA.names]
    if taken := [name for name in added if name.lower() in _TAKEN]:
        return f"it has an added column {taken[0]!r}, whose name is reserved"
    known = {other.schema.field(name) for other in others for name in added if name in other.column_names}
    if odd := [name for name in added if any(its.name == name and its != table.schema.field(name) for its in known)]:
        return f"its column {odd[0]!r} has another type than in other shards"
    return ""


def encode_object(
    run: str, shards: Sequence[Admitted], tables: Sequence[pa.Table], *, generation: int, retention: Sequence[int]
) -> tuple[Compaction, bytes]:
    """Return the compaction of these shards and the bytes of its object. `tables` has the rows of each shard."""
    ends = np.cumsum([-(-admitted.shard.rows // ROWS) for admitted in shards]).tolist()
    given_up = [table["response_tokens"].null_count for table in tables]
    compaction = Compaction(
        object="",
        bytes=0,
        sha256="",
        generation=generation,
        retention=tuple(retention),
        parts=tuple(
            Part(shard=shard, sync=sync, step=step, first_group=first, end_group=end, given_up=rows)
            for (shard, sync, step), (first, end), rows in zip(shards, pairwise([0, *ends]), given_up, strict=True)
        ),
        created_at="",
    )
    data = _bytes(run, compaction, tables)
    return _named(compaction, data), data


def decode_object(data: bytes, key: str) -> Compaction:
    """Return the compaction that the metadata of an object describes. Raise Damaged if the object is not a compaction,
    or if its content does not match its name."""
    try:
        footer = pq.read_metadata(pa.BufferReader(data))
    except UNREADABLE as error:
        raise Damaged(f"{key} is not a compaction: {str(error).splitlines()[0]}") from None
    said = (footer.metadata or {}).get(b"compaction", b"{}")
    named = _named(understood(records.decode(said, key), key), data)
    if named.object != key:
        raise Damaged(f"{key} has another content than its name says")
    return named


def _bytes(run: str, compaction: Compaction, tables: Sequence[pa.Table]) -> bytes:
    added = pa.unify_schemas([table.schema.remove_metadata() for table in tables])
    fields = [*COLUMNS, *(field for field in added if field.name not in TRAJECTORY_SCHEMA.names)]
    schema = pa.schema(fields, {"run": run, "compaction": encode(compaction)})
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, schema, **{**_OPTIONS, "write_statistics": _STATISTICS}) as writer:
        for part, table in zip(compaction.parts, tables, strict=True):
            facts = {"seq": part.shard.seq, "sync": part.sync, "step": part.step}
            columns = [_column(field, table, facts) for field in schema]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema), row_group_size=ROWS)
    return sink.getvalue().to_pybytes()


def _column(field: pa.Field, table: pa.Table, facts: Mapping[str, int]) -> pa.Array | pa.ChunkedArray:
    if field.name in facts:
        return pa.array(np.full(len(table), facts[field.name], np.int32))
    return table[field.name] if field.name in table.column_names else pa.nulls(len(table), field.type)


def _named(compaction: Compaction, data: bytes) -> Compaction:
    syncs, digest = [part.sync for part in compaction.parts], sha256(data).hexdigest()
    name = layout.compaction(min(syncs), max(syncs), digest)
    return replace(compaction, object=name.object, bytes=len(data), sha256=digest, created_at=records.now())
