"""Encodes and decodes Parquet objects. They are written with checksums, and a damaged object gives no table."""

from collections.abc import Collection

import pyarrow as pa
import pyarrow.parquet as pq

from tba.errors import Damaged, first_line


def encode(table: pa.Table) -> bytes:
    """Encode a table. The same table gives the same bytes."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    return sink.getvalue().to_pybytes()


def decode(data: bytes, name: str, schema: pa.Schema | None = None, *, later: Collection[str] = ()) -> pa.Table:
    """Return the table in `data`. If a schema is given, return only the columns of the schema. `later` names columns
    that older objects lack; if such a column is missing, it is filled with nulls. Raise Damaged, naming the object, if
    `data` is not a readable Parquet file with these columns."""
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        table = file.read(use_threads=False)
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise Damaged(f"{name} is not a readable Parquet object: {first_line(error)[:200]}") from None
    if len(table) != file.metadata.num_rows:  # checksums cover pages, but not the metadata of the file
        raise Damaged(f"{name} has {len(table)} rows, but its metadata says {file.metadata.num_rows}")
    if schema is None:
        return table
    for column in later:
        if column not in table.column_names:
            table = table.append_column(schema.field(column), pa.nulls(len(table), schema.field(column).type))
    if differing := _differing(table.schema, schema):
        raise Damaged(f"{name} has other columns: {differing}")
    return table.select(schema.names)


def _differing(found: pa.Schema, wanted: pa.Schema) -> str:
    """Return what is wrong with the first column that differs from the schema `wanted`; an empty string if none
    does."""
    for field in wanted:
        places = found.get_all_field_indices(field.name)
        if len(places) != 1:
            return f"{field.name!r} occurs {len(places)} times"
        if not found.field(places[0]).equals(field):
            return f"{field.name!r} is {found.field(places[0]).type}, not {field.type}"
    return ""
