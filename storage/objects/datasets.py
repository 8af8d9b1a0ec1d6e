"""Reads the rows of a data set from JSON lines or Parquet, on a disk or at a URL."""

import os
import re
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, cast

import fsspec
import pyarrow as pa

from storage.objects import parquet, strict_json
from tba.errors import Damaged, DataError

_READABLE = (".jsonl", ".json", ".parquet")


def read_rows(url: str, *, limit: int | None = None, fields: Collection[str] | None = None) -> list[dict[str, Any]]:
    """Return the rows of a file in their order, at most `limit` of them. The file lies at a path or at a `file://`,
    `s3://` or `hf://` URL. If the file's name has a `*`, return the rows of all matching files, in the order of the
    names. If `fields` is given, each row keeps only the fields named there. Raise DataError if a file cannot be read.
    The error names the file and, in JSON lines, the line."""
    suffix = _suffix(url)
    rows: list[dict[str, Any]] = []
    for part in _parts(url):
        data, left = _read(part), None if limit is None else limit - len(rows)
        rows += _parquet(part, data, left, fields) if suffix == ".parquet" else _json_lines(part, data, left, fields)
    return rows


class Placed(NamedTuple):
    """A row and its place in a file, for messages that name the row: `FILE line 3`, or `FILE row 3` of Parquet."""

    place: str
    row: dict[str, Any]
    names: Sequence[str]  # all fields that the file has for the row, including those that `row` leaves out


def placed_rows(url: str, *, fields: Collection[str]) -> dict[str, list[Placed]]:
    """Return the rows of all files that `url` stands for, as `read_rows` does, each with its place. The keys of the
    result are the paths or URLs of the files."""
    found: dict[str, list[Placed]] = {}
    for part in _parts(url):
        data = _read(part)
        if _suffix(part) == ".parquet":
            table = _table(part, data)
            rows = enumerate(_rows(part, table, fields), start=1)
            found[part] = [Placed(f"{part} row {number}", row, table.column_names) for number, row in rows]
        else:
            rows = ((n, _row(part, n, line)) for n, line in _numbered_lines(data))
            found[part] = [Placed(f"{part} line {n}", _some(row, fields), list(row)) for n, row in rows]
    return found


def _suffix(url: str) -> str:
    suffix = PurePosixPath(url).suffix
    if suffix not in _READABLE:
        raise DataError(f"{url}: rows come from {', '.join(_READABLE)} files, got suffix {suffix!r}")
    return suffix


def _parts(url: str) -> list[str]:
    """Return the URL itself, or the URLs of all files that match its `*`."""
    folder, _, name = url.rpartition("/")
    if "*" not in name:
        return [url]
    try:
        names = _names(folder)
    except Exception as error:
        raise DataError(f"{url} cannot be read: {error or type(error).__name__}") from error
    pattern = re.compile(".*".join(map(re.escape, name.split("*"))), re.DOTALL)
    if found := sorted(filter(pattern.fullmatch, names)):
        return [f"{folder}/{name}" if folder else name for name in found]
    raise DataError(f"{url} cannot be read: no such file")


def _names(folder: str) -> list[str]:
    if folder.startswith("s3://"):
        from storage.objects.s3.store import S3Store  # only rows on S3 pay for the import

        return list(S3Store.names_in(folder))
    if "://" not in folder:  # fsspec would take a "::" in a path for a chain of file systems
        return os.listdir(Path(folder or ".").expanduser())
    system, path = fsspec.url_to_fs(folder)
    return [PurePosixPath(found).name for found in system.ls(path, detail=False)]


def _read(url: str) -> bytes:
    try:
        if url.startswith("s3://"):
            from storage.objects.s3.store import S3Store

            return S3Store.read_any(url)
        if "://" not in url:
            return Path(url).expanduser().read_bytes()
        with fsspec.open(url, "rb") as file:
            return cast(BinaryIO, file).read()
    except Exception as error:  # file systems, above all the hub's, raise the errors of their HTTP libraries
        raise DataError(f"{url} cannot be read: {error or type(error).__name__}") from error


def _parquet(url: str, data: bytes, limit: int | None, fields: Collection[str] | None) -> list[dict[str, Any]]:
    return _rows(url, _table(url, data).slice(0, limit), fields)


def _table(url: str, data: bytes) -> pa.Table:
    try:
        return parquet.decode(data, url)
    except Damaged as error:
        raise DataError(str(error)) from None


def _rows(url: str, table: pa.Table, fields: Collection[str] | None) -> list[dict[str, Any]]:
    columns: dict[str, list[Any]] = {}
    for name in table.column_names:
        if fields is not None and name not in fields:
            continue
        if table.column_names.count(name) > 1:
            raise DataError(f"{url} has more than one column {name!r}")
        try:
            columns[name] = table[name].to_pylist()
        except (pa.ArrowException, OverflowError, ValueError, LookupError) as error:  # e.g. for times in nanoseconds
            raise DataError(f"{url}: column {name!r} cannot be read: {error}") from None
    return [{name: column[n] for name, column in columns.items()} for n in range(len(table))]


def _json_lines(url: str, data: bytes, limit: int | None, fields: Collection[str] | None) -> list[dict[str, Any]]:
    rows = (_row(url, number, line) for number, line in islice(_numbered_lines(data), limit))
    return [_some(row, fields) for row in rows]


def _some(row: dict[str, Any], fields: Collection[str] | None) -> dict[str, Any]:
    return {name: row[name] for name in row if fields is None or name in fields}


def _numbered_lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    return ((number, line) for number, line in enumerate(data.split(b"\n"), start=1) if line.strip())


def _row(url: str, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = strict_json.loads(line)
    except strict_json.DoubledKey as error:
        raise DataError(f"{url} line {number}: {error}") from None
    except ValueError as error:
        raise DataError(f"{url} line {number} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise DataError(f"{url} line {number} is a {type(row).__name__}, not an object")
    return row
