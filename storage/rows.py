"""Rows of a data set, from JSON lines or Parquet, wherever they lie."""

import json
from itertools import islice
from pathlib import PurePosixPath
from typing import Any, BinaryIO, cast

import fsspec

from storage import parquet
from storage.store import open_store
from tba.errors import Damaged, DataError

_READABLE = (".jsonl", ".json", ".parquet")


def read_rows(url: str, *, limit: int | None = None) -> list[dict[str, Any]]:
    """The rows of a file at a path or a `file://`, `s3://` or `hf://` URL, in its order, `limit` at most. DataError
    names the URL, and the line, at fault."""
    suffix = PurePosixPath(url).suffix
    if suffix not in _READABLE:
        raise DataError(f"{url}: rows come from {', '.join(_READABLE)} files, not {suffix or 'one without a suffix'!r}")
    data = _read(url)
    return _parquet(url, data, limit) if suffix == ".parquet" else _json_lines(url, data, limit)


def _read(url: str) -> bytes:
    folder, _, name = url.rpartition("/")
    try:
        if url.startswith("s3://"):
            return open_store(folder).read(name)
        with fsspec.open(url, "rb") as file:
            return cast(BinaryIO, file).read()
    except Exception as error:  # file systems, the hub's above all, let their transport's own errors through
        raise DataError(f"{url} cannot be read: {error or type(error).__name__}") from error


def _parquet(url: str, data: bytes, limit: int | None) -> list[dict[str, Any]]:
    try:
        return parquet.decode(data, url).slice(0, limit).to_pylist()
    except Damaged as error:
        raise DataError(str(error)) from None


def _json_lines(url: str, data: bytes, limit: int | None) -> list[dict[str, Any]]:
    lines = ((number, line) for number, line in enumerate(data.split(b"\n"), start=1) if line.strip())
    return [_row(url, number, line) for number, line in islice(lines, limit)]


def _row(url: str, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{url} line {number} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise DataError(f"{url} line {number} is a {type(row).__name__}, not an object")
    return row
