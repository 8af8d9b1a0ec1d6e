"""Encode the rows of an answer as JSON that keeps the types of values, and decode them in another process. Long values
are cut."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any

from tba.errors import Refused

_COST = 16  # characters that each value counts in addition to its text
_MOST_BITS = 4096  # longest integer that is written in digits

_PLAIN = (bool, float, type(None))


@dataclass(frozen=True)
class Bounds:
    """The maximum size of an answer: characters of a text, items of a list, and characters in all."""

    text: int
    items: int
    whole: int


@dataclass(frozen=True)
class Other:
    """Stands for a value whose type cannot be transferred. It has the texts of the value by `str` and by `repr`."""

    text: str
    representation: str

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return self.representation


class Encoder:
    """Encodes the rows of one answer. A text or list that is too long is cut; an answer that is too long is refused."""

    def __init__(self, bounds: Bounds):
        self._bounds = bounds
        self._left = bounds.whole

    def row(self, values: Iterable[Any]) -> list[Any]:
        return [self._encode(value) for value in values]

    def _encode(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._cut(value)
        self._spend(_COST)
        if isinstance(value, _PLAIN) or (isinstance(value, int) and value.bit_length() <= _MOST_BITS):
            return value
        if isinstance(value, list):
            return self.row(value[: self._bounds.items])
        if isinstance(value, tuple):
            return {"tuple": self.row(value[: self._bounds.items])}
        if isinstance(value, dict):
            pairs = [pair for pair, _ in zip(value.items(), range(self._bounds.items), strict=False)]
            return {"dict": [self.row(pair) for pair in pairs]}
        if isinstance(value, datetime):
            return {"datetime": value.isoformat()}
        if isinstance(value, Decimal):
            return {"decimal": str(value)}
        return self._other(value)

    def _other(self, value: Any) -> Any:
        if isinstance(value, int):
            name = f"an integer of {value.bit_length():,} bits"
            return {"other": [name, name]}
        if isinstance(value, bytes):
            value = value[: self._bounds.text]
        return {"other": [self._cut(str(value)), self._cut(repr(value))]}

    def _cut(self, text: str) -> str:
        text = text[: self._bounds.text]
        self._spend(_COST + len(text))
        return text

    def _spend(self, characters: int) -> None:
        self._left -= characters
        if self._left < 0:
            raise Refused(
                f"the answer is longer than {self._bounds.whole / 1e6:,.0f} million characters: ask for fewer rows or "
                "columns, or for parts of them, such as left(response, 200)"
            )


def encode_row(values: Iterable[Any]) -> list[Any]:
    """Encode values without bounds: nothing is cut or refused."""
    return Encoder(Bounds(sys.maxsize, sys.maxsize, sys.maxsize)).row(values)


def decode_row(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(map(_decode, values))


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    [(kind, inside)] = value.items()
    match kind:
        case "tuple":
            return decode_row(inside)
        case "dict":
            return {_key(key): _decode(item) for key, item in inside}
        case "datetime":
            return datetime.fromisoformat(inside)
        case "decimal":
            return Decimal(inside)
        case _:
            return Other(*inside)


def _key(key: Any) -> Any:
    """Return the key of a map. A list cannot be a key of a Python dict, so it becomes its text."""
    key = _decode(key)
    return key if isinstance(key, str | int | float | Decimal | datetime | Other | None) else str(key)
