"""Writes and reads records: small facts, each stored as one JSON object that people and DuckDB can read.

The last field of a record, `digest`, is the sha256 of all bytes before that field. So a reader can verify that the
record is still what was written. Records of older runs have no digest and are read without verification.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from typing import Any, TypeVar

from storage import layout
from storage.objects.store import Store
from tba.errors import Damaged, Missing, first_line

T = TypeVar("T")

DIGEST = "digest"
"""Name of the last field of a record: the sha256 of all bytes before this field."""

_BEFORE_DIGEST = f',\n "{DIGEST}": '.encode()
_ONLY_DIGEST = f'\n "{DIGEST}": '.encode()  # in a record without other fields

_PLAIN: dict[Any, tuple[type, ...]] = {int: (int,), float: (float, int, type(None)), str: (str,), bool: (bool,)}
"""For each plain type of a field, the types that its JSON value may have. True and false do not count as numbers. A
float that is not finite is stored as null."""


def now() -> str:
    """Return the current time in UTC, in the format of all records."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def encode(record: Mapping[str, Any]) -> bytes:
    """Encode a record with its digest. The same record gives the same bytes. Numbers that are not finite become null,
    because JSON cannot express them."""
    plain = {name: value for name, value in record.items() if name != DIGEST}
    try:
        text = json.dumps(plain, indent=1, ensure_ascii=False, allow_nan=False)
    except ValueError:
        finite = json.loads(json.dumps(plain), parse_constant=lambda _: None)
        text = json.dumps(finite, indent=1, ensure_ascii=False)
    body = text.removesuffix("}").rstrip("\n").encode()
    return body + (_BEFORE_DIGEST if plain else _ONLY_DIGEST) + f'"{sha256(body).hexdigest()}"\n}}\n'.encode()


def decode(data: bytes, name: str, *fields: str) -> dict[str, Any]:
    """Return the record in `data` without its digest. Raise Damaged, naming the object, if `data` is not a record with
    these fields, or does not match its digest."""
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{name} is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise Damaged(f"{name} is not a record but a {type(record).__name__}")
    if (digest := record.pop(DIGEST, None)) is not None and digest != _digest_of(data):
        raise Damaged(f"{name} is not what was written: its digest differs")
    missing = [field for field in fields if field not in record]
    if missing:
        raise Damaged(f"{name} lacks {', '.join(map(repr, missing))}")
    return record


def has_digest(data: bytes) -> bool:
    """True if a record was written with a digest, so that `decode` verifies it."""
    return _BEFORE_DIGEST in data or _ONLY_DIGEST in data


def _digest_of(data: bytes) -> str:
    body, separator, _ = data.rpartition(_BEFORE_DIGEST)
    return sha256(body if separator else data.partition(_ONLY_DIGEST)[0]).hexdigest()


def known(kind: type[T], record: Mapping[str, Any], **others: Any) -> T:
    """Return a dataclass that is filled from a record and from `others`. Fields of the record that the dataclass does
    not have are ignored: a later version may have added them. Raise TypeError if a value of the record is not of the
    plain type of its field."""
    types = {field.name: field.type for field in fields(kind)}  # pyright: ignore[reportArgumentType]
    said = {name: value for name, value in record.items() if name in types and name not in others}
    for name, value in said.items():
        check_kind(name, value, types[name])
    return kind(**said, **others)


def check_kind(name: str, value: Any, kind: Any) -> None:
    """Raise TypeError, naming the field, if `kind` is a plain type and the value is of another type. If `kind` is not a
    plain type, check nothing."""
    if kind in _PLAIN and type(value) not in _PLAIN[kind]:
        raise TypeError(f"{name} is of type {type(value).__name__}, not {kind.__name__}")


def integers(record: Mapping[str, Any], *names: str) -> list[int]:
    """Return the values of these fields. Raise TypeError, naming the field, if a value is no integer."""
    for name in names:
        check_kind(name, record[name], int)
    return [record[name] for name in names]


@contextmanager
def reading(name: str) -> Iterator[None]:
    """In the `with` block, use the values of the record `name`. If a field is missing, or has a wrong type or value,
    raise Damaged, naming the record."""
    try:
        yield
    except KeyError as error:
        raise Damaged(f"{name} lacks {error}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise Damaged(f"{name} cannot be decoded: {first_line(error)}") from None


def read(store: Store, key: str, *fields: str) -> dict[str, Any]:
    return decode(store.read(key), f"{store.url}/{key}", *fields)


def sha256_of(store: Store, key: str) -> str | None:
    """Return the sha256 of an object; None if there is no such object. The next record of a series holds the sha256 of
    the record before it."""
    try:
        return sha256(store.read(key)).hexdigest()
    except Missing:
        return None


def read_each(store: Store, keys: Sequence[str]) -> list[tuple[str, Callable[[], bytes]]]:
    """Read several objects at the same time. Return, for each key, the key and a function that returns the object's
    bytes, or raises Missing if there is no such object. So a missing object does not prevent reading the others."""
    try:
        found = store.read_many(keys)
    except Missing:
        return [(key, partial(store.read, key)) for key in keys]
    return [(key, partial(bytes, data)) for key, data in zip(keys, found, strict=True)]


def read_all(store: Store, prefix: str, *fields: str) -> Iterator[dict[str, Any]]:
    """Yield the records under a folder, in the order of their keys. Objects with names that no run uses are skipped.
    Raise Damaged if a record is damaged."""
    keys = [entry.key for entry in store.list(prefix) if layout.is_part(entry.key)]
    for key, data in zip(keys, store.read_many(keys), strict=True):
        yield decode(data, f"{store.url}/{key}", *fields)
