"""Reads JSON that people write by hand. A key that is given twice is refused, because the standard reader would
silently keep only the last value."""

import json
from collections.abc import Sequence
from typing import Any


class DoubledKey(ValueError):
    """An object has a key more than once."""


def loads(text: str | bytes) -> Any:
    """Read JSON. Raise DoubledKey if any object has a key twice, and another ValueError if the text is not JSON."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    seen: set[str] = set()
    doubled = next(key for key, _ in pairs if key in seen or seen.add(key))
    raise DoubledKey(f"key {doubled!r:.80} is given more than once")
