"""How small facts are written: one JSON object each, readable by a person and by DuckDB."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any, TypeVar

from storage import layout
from storage.store import Store
from tba.errors import Damaged

T = TypeVar("T")


def now() -> str:
    """The time as every record writes it."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def encode(record: Mapping[str, Any]) -> bytes:
    """The same record gives the same bytes. Numbers that are not finite become null: JSON has none."""
    try:
        text = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False)
    except ValueError:
        finite = json.loads(json.dumps(record), parse_constant=lambda _: None)
        text = json.dumps(finite, indent=1, ensure_ascii=False)
    return (text + "\n").encode()


def decode(data: bytes, name: str, *fields: str) -> dict[str, Any]:
    """The record in `data`; Damaged, naming the object and what it lacks, unless it is one with these fields."""
    try:
        record = json.loads(data)
    except ValueError as error:
        raise Damaged(f"{name} is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise Damaged(f"{name} is not a record but a {type(record).__name__}")
    missing = [field for field in fields if field not in record]
    if missing:
        raise Damaged(f"{name} lacks {', '.join(map(repr, missing))}")
    return record


def known(kind: type[T], record: Mapping[str, Any], **others: Any) -> T:
    """A dataclass of what a record says, and `others`. What a later version has added to such records is left out."""
    names = {field.name for field in fields(kind)}  # pyright: ignore[reportArgumentType]
    return kind(**{**{name: value for name, value in record.items() if name in names}, **others})


@contextmanager
def reading(name: str) -> Iterator[None]:
    """While its values are put to use: what a record lacks, or has of another kind, as Damaged that names it."""
    try:
        yield
    except KeyError as error:
        raise Damaged(f"{name} lacks {error}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise Damaged(f"{name} is not understood: {(str(error) or type(error).__name__).splitlines()[0]}") from None


def read(store: Store, key: str, *fields: str) -> dict[str, Any]:
    return decode(store.read(key), f"{store.url}/{key}", *fields)


def read_all(store: Store, prefix: str, *fields: str) -> Iterator[dict[str, Any]]:
    """Every record under a folder, in the order of their names. What else lies there is passed over."""
    keys = [entry.key for entry in store.list(prefix) if layout.is_part(entry.key)]
    for key, data in zip(keys, store.read_many(keys), strict=True):
        yield decode(data, f"{store.url}/{key}", *fields)
