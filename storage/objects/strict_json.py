"""JSON that people write by hand: a key that is given twice is refused, where the standard reader keeps the last."""

import json
from collections.abc import Sequence
from typing import Any


class DoubledKey(ValueError):
    """An object has a key more than once."""


def loads(text: str | bytes) -> Any:
    """Read JSON; DoubledKey names a key that any object has twice, another ValueError says what is no JSON."""
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
