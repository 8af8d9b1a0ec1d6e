"""Check the settings and rows of tasks. Errors name the setting, or the row and its field."""

from collections.abc import Collection, Mapping
from typing import Any

from tba.errors import ConfigError, DataError


def one_of(field: str, value: str, choices: Collection[str]) -> str:
    """Return the value of a task's setting. Raise ConfigError unless the value is one of the choices."""
    if value not in choices:
        raise ConfigError(f"task.{field} must be one of {', '.join(choices)}, got {value!r}")
    return value


def text_in(split: str, index: int, row: Mapping[str, Any], field: str) -> str:
    value = row.get(field)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{split} row {index}: field {field!r} must be text, got {value!r}")
    return value
