"""Problems of reasoning_gym as JSON, from which exactly the same problem can be made again.

The scorers of the library need a problem as it was made, and JSON has no tuples and no keys that are numbers. So a
tuple is written as `{"tuple": […]}`, and an object with other keys than text as `{"items": [[key, value], …]}`.
"""

from collections.abc import Mapping
from typing import Any

_MARKS = ("tuple", "items")


def encode(value: Any) -> Any:
    """Return a value as JSON. Raise TypeError if that is not possible."""
    if hasattr(value, "dtype") and hasattr(value, "item"):  # a number or text of NumPy
        value = value.item()
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item) for item in value]}
    if not isinstance(value, Mapping):
        raise TypeError(f"a problem must consist of JSON and tuples, got {value!r:.80}")
    if all(isinstance(key, str) for key in value) and list(value) not in ([mark] for mark in _MARKS):
        return {str(key): encode(item) for key, item in value.items()}
    return {"items": [[encode(key), encode(item)] for key, item in value.items()]}


def decode(value: Any) -> Any:
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if list(value) == ["tuple"]:
        return tuple(decode(item) for item in value["tuple"])
    if list(value) == ["items"]:
        return {decode(key): decode(item) for key, item in value["items"]}
    return {key: decode(item) for key, item in value.items()}
