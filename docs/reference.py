"""Generate the reference of settings, commands and metrics, from the docstrings in tba/config/ and tba/objectives/, the
help of the command line and the catalogue of metrics."""

import argparse
import ast
import dataclasses
import inspect
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import TypeAdapter

from flows import cli
from flows.commands import arguments
from flows.metrics.catalogue import METRICS
from tba.config import Config
from tba.config.kinds import KINDS
from tba.presets import PRESETS, preset

_NUMBERS = {"integer": "whole number", "number": "number"}
_HIDDEN = ("help", "debug")


# --- settings ---------------------------------------------------------------------------------------------------------


def settings() -> str:
    """Return a table of each section, with the range, default and meaning of each setting, and a table of presets."""
    schema = TypeAdapter(Config).json_schema()["$defs"]
    defaults = Config().to_dict()
    sections = {name: value for name, value in defaults.items() if isinstance(value, dict)}
    parts = []
    for name in sections:
        own = kinds(name)
        rows = [
            f"| `{name}.{field}` | {_joined(_allowed(it, schema) for it in properties)} | {default} | {meaning} |"
            for field, properties, default, meaning in _rows(own, schema)
        ]
        about = _cell(meanings(own[0] if len(own) == 1 else own[0].__mro__[1])[""])
        parts.append(f"## {name}\n\n{about}\n\n" + _table(["setting", "may be", "default", " "], rows))
    seed = f"`seed`, by default {defaults['seed']}: the seed of all random choices.\n"
    return "\n" + "\n".join([seed, *parts, _presets(sections)])


def kinds(section: str) -> list[type]:
    """The classes of settings that a section can have, the default one first."""
    default = type(getattr(Config(), section))
    return [default, *(kind for kind in KINDS.get(section, {}).values() if kind is not default)]


def _rows(kinds: list[type], schema: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]], str, str]]:
    """Yield every setting of some kinds, in order: its schemas, its defaults and its meaning. A setting that only some
    kinds have says which, and so does a default that differs between kinds."""
    have: dict[str, list[type]] = {}
    for kind in kinds:
        for field in dataclasses.fields(kind):
            have.setdefault(field.name, []).append(kind)
    for field, owners in have.items():
        properties = [schema[kind.__name__]["properties"][field] for kind in owners]
        defaults: dict[str, list[str]] = {}
        for kind, it in zip(owners, properties, strict=True):
            empty = {} if it.get("type") == "object" else None
            defaults.setdefault(_value(it.get("default", empty)), []).append(_name(kind))
        first, *others = defaults.items()
        shown = (
            first[0]
            if field == "name"
            else "; ".join([first[0], *(f"{value} for {', '.join(names)}" for value, names in others)])
        )
        yield field, properties, shown, _cell(meaning(owners, field)) + _which(owners, kinds)


def _which(owners: list[type], kinds: list[type]) -> str:
    """Return a sentence that says which kinds have a setting, or which do not have it, whatever is shorter."""
    others = [kind for kind in kinds if kind not in owners]
    if not others:
        return ""
    if len(owners) <= len(others):
        return f" This is a setting of {_all_names(owners)} only."
    names = _all_names(others)
    return f" {names} {'do' if ' and ' in names else 'does'} not have this setting."


def _all_names(kinds: list[type]) -> str:
    """Return the names of several kinds, the last one after "and"."""
    *first, last = ", ".join(map(_name, kinds)).split(", ")
    return f"{', '.join(first)} and {last}" if first else last


def _name(kind: type) -> str:
    """The names that choose a kind."""
    chosen = [name for kinds in KINDS.values() for name, it in kinds.items() if it is kind]
    return ", ".join("a class of your own" if name == "custom" else f"`{name}`" for name in chosen)


def meaning(kinds: list[type], field: str) -> str:
    """The docstring below a field, from the first of some kinds, or of their bases, that has one."""
    return next((said for kind in kinds for it in kind.__mro__ if (said := meanings(it).get(field))), "")


def meanings(section: type) -> dict[str, str]:
    """The docstrings below the fields that a class of settings declares itself; its own under the empty name."""
    if not dataclasses.is_dataclass(section):
        return {}
    (node,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(node, ast.ClassDef)
    return dict(_documented(node))


def _documented(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    yield "", ast.get_docstring(node) or ""
    for field, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = after.value if isinstance(after, ast.Expr) else None
            yield field.target.id, text.value if isinstance(text, ast.Constant) else ""  # pyright: ignore[reportReturnType]


def _allowed(schema: dict[str, Any], whole: dict[str, Any]) -> str:
    """Say in words what a JSON schema lets through."""
    if "$ref" in schema:
        return _allowed(whole["$defs"][schema["$ref"].rpartition("/")[2]], whole)
    if options := schema.get("anyOf"):
        kinds = [_allowed(it, whole) for it in options if it.get("type") != "null"]
        return ", ".join(kinds) + (", null" if len(kinds) < len(options) else "")
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{it}`" for it in schema["enum"])
    match schema.get("type"):
        case "integer" | "number" as kind:
            return _NUMBERS[kind] + _bounds(schema)
        case "boolean":
            return "`true`, `false`"
        case "array":
            inside = schema.get("prefixItems")
            return f"[{', '.join(['number'] * len(inside))}]" if inside else "list"
        case "object":
            return "names with values"
        case _:
            return "text"


def _joined(allowed: Iterable[str]) -> str:
    """The different values that some kinds allow, each once."""
    return ", ".join(dict.fromkeys(part for it in allowed for part in it.split(", ")))


def _bounds(schema: dict[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    least = f"from {low:g}" if low is not None else f"above {above:g}" if above is not None else ""
    most = f"to {high:g}" if high is not None and high < 1e6 else f"below {below:g}" if below and below < 1e6 else ""
    return "".join(f", {it}" if n == 0 else f" {it}" for n, it in enumerate(filter(None, (least, most))))


def _presets(sections: dict[str, dict[str, Any]]) -> str:
    """Return a table of the settings in which at least one preset differs from the default. Each option of a task has
    a row of its own."""
    made = {name: preset(name).to_dict() for name in PRESETS}
    options = dict.fromkeys(option for name in PRESETS for option in made[name]["task"].pop("options"))
    rows = []
    for section, fields in sections.items():
        for it, default in fields.items():
            values = [made[name][section].get(it, default) for name in PRESETS]
            if (section, it) != ("task", "name") and any(value != default for value in values):
                cells = " | ".join("" if value == default else _value(value) for value in values)
                rows.append(f"| `{section}.{it}` | {_value(default)} | {cells} |")
    for option in options:
        values = [preset(name).task.options.get(option) for name in PRESETS]
        cells = " | ".join("" if value is None else _value(value) for value in values)
        rows.append(f"| `task.options.{option}` | unset | {cells} |")
    head = ["setting", "default", *(f"`{name}`" for name in PRESETS)]
    intro = (
        "Each preset changes these settings from their defaults; an empty cell is the default. What each setting "
        "means, also when unset, is in the tables above."
    )
    return f"## Presets\n\n{intro}\n\n" + _table(head, rows)


def _value(value: Any) -> str:
    if value is None:
        return "unset"
    if value in ("", {}, (), []):
        return "empty"
    return f"`{value}`" if isinstance(value, str) and "\n" not in value else f"`{json.dumps(value)}`"


# --- commands ---------------------------------------------------------------------------------------------------------


def commands() -> str:
    """Return the help of every command."""
    return "\n" + "\n".join(_command(name, parser) for name, parser in parsers().items())


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command, by the name of the command."""
    (action,) = (it for it in cli.build_parser()._actions if isinstance(it, argparse._SubParsersAction))
    return dict(action.choices)


def _command(name: str, parser: argparse.ArgumentParser) -> str:
    """Return the section of one command: its description, arguments and examples."""
    first, _, about = (parser.description or "").partition("\n\n")
    actions = [it for it in parser._actions if it.dest not in _HIDDEN and it.help != argparse.SUPPRESS]
    rows = [f"| `{_named(it)}` | {_cell(_help(it))} |" for it in actions]
    examples = [line.strip() for line in (parser.epilog or "").splitlines()[1:]]
    return (
        f"## tba {name}\n\n{first}\n\n"
        + (f"{_paragraphs(about)}\n\n" if about else "")
        + _table(["argument", " "], rows)
        + "\n```\n"
        + "".join(f"{it}\n" for it in examples)
        + "```\n"
    )


def _named(action: argparse.Action) -> str:
    shown = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
    shown = f"{shown} …" if action.nargs in ("+", "*") else str(shown)
    return " ".join(filter(None, (", ".join(action.option_strings), shown)))


def _help(action: argparse.Action) -> str:
    if action.help == arguments.RUN_HELP:  # the page explains it once, at its top
        return "a run" if action.nargs is None else "runs"
    return (action.help or "").replace("%(default)s", str(action.default))


def _paragraphs(text: str) -> str:
    """Return a text in which indented lines, which are commands, become code blocks."""
    lines = [f"\n    {line.strip()}\n" if line.startswith("  ") else line for line in text.splitlines()]
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Return a text in one line, in which names of pages are links."""
    return re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", " ".join(text.split()).replace("|", "\\|"))


# --- metrics ----------------------------------------------------------------------------------------------------------


def metrics() -> str:
    """Return a table of all metrics that `tba metrics` exports."""
    rows = [
        f"| `{name}` | {', '.join(f'`{label}`' for label in metric.labels)} | {_cell(metric.meaning)} |"
        for name, metric in METRICS.items()
    ]
    return "\n" + _table(["metric", "labels", " "], rows)


def _table(head: list[str], rows: list[str]) -> str:
    return f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n" + "".join(f"{row}\n" for row in rows)
