"""The two sections whose settings depend on the setting `name`: the objective and the engine."""

from collections.abc import Mapping
from dataclasses import fields
from types import NoneType
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tba.config.engine import ENGINES, CustomEngine
from tba.objectives import OBJECTIVES

KINDS: Mapping[str, Mapping[str, type]] = {"objective": OBJECTIVES, "engine": {**ENGINES, "custom": CustomEngine}}
DEFAULTS: Mapping[str, str] = {"objective": "trajectory-balance", "engine": "auto"}


def kind_of(section: str, name: Any) -> type | None:
    """Return the class of settings that `name` chooses, or None if the name is unknown."""
    if not isinstance(name, str):
        return None
    return KINDS[section].get("custom" if ":" in name and section == "engine" else name)


def names_of(section: str) -> set[str]:
    """Return the names of all settings that some choice in the section has."""
    return {field.name for kind in KINDS[section].values() for field in fields(kind)}


def switched(before: Any, name: Any, section: str) -> dict[str, Any]:
    """Return the settings of a section after `name` has changed. Settings that had their defaults take the defaults of
    the new choice. The others stay, even if the new choice does not have them, so that `parse` refuses them by name."""
    kind = kind_of(section, name)
    if kind is None:
        return {**_values(before), "name": name}
    chosen = {field: value for field, value in _values(before).items() if value != _defaults(type(before)).get(field)}
    chosen.pop("options", None)  # options belong to the class of the previous choice
    return {**_defaults(kind), **chosen, "name": name}


def _values(section: Any) -> dict[str, Any]:
    return {field.name: getattr(section, field.name) for field in fields(section)}


def _defaults(kind: type) -> dict[str, Any]:
    """Return the default of every setting that has one."""
    known: dict[str, Any] = vars(kind)["__pydantic_fields__"]
    return {
        name: field.get_default(call_default_factory=True) for name, field in known.items() if not field.is_required()
    }


def without_old_defaults(before: Any, values: dict[str, Any], section: str) -> dict[str, Any]:
    """Return `values` without the settings that the new choice does not have, if they still have the default of the
    previous choice (`before`). Other settings that the new choice does not have stay, so that parsing refuses them by
    name."""
    kind, defaults = kind_of(section, values.get("name")), _defaults(type(before))
    if kind is None:
        return values
    own = {field.name for field in fields(kind)}
    return {
        name: value
        for name, value in values.items()
        if name in own or name not in defaults or not means(value, defaults[name])
    }


def means(value: Any, default: Any) -> bool:
    """True if a value equals the default. If the default is a number, the value may be the text of this number."""
    if isinstance(value, str) and not isinstance(default, str | None):
        try:
            value = TypeAdapter(type(default)).validate_python(value)
        except ValidationError:
            return False
    return type(value) in (str, int, float, bool, NoneType, dict) and value == default
