"""`tba export --query`: export rows of a run as a dataset: a Parquet file, and a card that names run and query."""

import re
from pathlib import Path
from typing import Any

import duckdb
from duckdb.sqltypes import DuckDBPyType

from flows.commands.export_version import appearing
from flows.progress import bar
from flows.queries import answer_forms, damage_report, statements
from flows.queries.damage_report import warn
from storage import layout
from storage.queries.views import connect
from storage.runs.run import Run
from tba.errors import ConfigError

FILE = "data/train-00000-of-00001.parquet"

_UNFIT = ("bignum", "bit", "interval", "map", "union")  # types that `datasets` cannot load
_CARD = """\
---
configs:
- config_name: default
  data_files:
  - split: train
    path: {file}
tags:
- tba
---

# {name}

{count:,} rows of the run `{run}`: task {task}, {policy}, made with TBA {code_version} and begun on {created}.

{fence}sql
{query}
{fence}

| column | type |
|---|---|
{columns}

Responses were sampled from versions of a policy in training, at temperature {temperature:g} and top-p {top_p:g} unless
the task asked otherwise, and rewards are the task's, but for rows that were imported (`searcher` from {imports:,} on):
those are as their files had them. Terms of use follow from those of the prompts and of whatever answered.
"""


def export(run: Run, query: str, folder: str) -> Path:
    """Export the rows of a query into a folder and return its path. The folder appears only once it is complete. Raise
    ConfigError if the query is wrong or has no rows."""
    with bar("copying what is new") as tell:
        con = connect(run, progress=tell)
    warn(run, con)
    with damage_report.naming_errors(run), statements.stopping(con), appearing(folder) as (target, unfinished):
        rows = statements.last(con, query)
        if rows is None:
            raise ConfigError("--query: the last statement has no rows")
        statements.check_names("--query", rows.columns)
        rows = _fit(rows)
        (unfinished / FILE).parent.mkdir()
        if not (count := answer_forms.parquet(rows, unfinished / FILE)):
            raise ConfigError("--query: there are no such rows")
        card = _card(run, query, rows, count, target.name)
        (unfinished / "README.md").write_text(card, encoding="utf-8", errors="replace")
    return target


def _fit(rows: duckdb.DuckDBPyRelation) -> duckdb.DuckDBPyRelation:
    """Return the rows with each map turned into a list of pairs (key, value), since `datasets` cannot load maps. Raise
    ConfigError if a column has a type that `datasets` cannot load in any form."""
    chosen: list[str] = []
    for name, kind in zip(rows.columns, rows.types, strict=True):
        column = '"' + name.replace('"', '""') + '"'
        if any(map(_is_unfit, _inner(kind) if kind.id == "map" else [kind])):
            raise ConfigError(f"--query: {name!r} is of type {kind}, which no dataset has: cast it, as to varchar")
        chosen.append(f"map_entries({column}) as {column}" if kind.id == "map" else column)
    return rows.project(", ".join(chosen))


def _is_unfit(kind: DuckDBPyType) -> bool:
    return kind.id in _UNFIT or any(map(_is_unfit, _inner(kind)))


def _inner(kind: DuckDBPyType) -> list[DuckDBPyType]:
    """Return the types of the elements, fields, or keys and values of a list, struct or map. Return an empty list for
    other types."""
    if kind.id not in ("array", "list", "map", "struct"):
        return []
    return [inner for _, inner in kind.children if isinstance(inner, DuckDBPyType)]


def _card(run: Run, query: str, rows: duckdb.DuckDBPyRelation, count: int, name: str) -> str:
    def setting(dotted: str) -> Any:
        section, _, field = dotted.partition(".")
        return run.config.get(section, {}).get(field)

    path, query = str(setting("model.path") or ""), query.strip()
    types = zip(rows.columns, rows.types, strict=True)
    return _CARD.format(
        file=FILE, name=name, count=count, run=run.name, fence=_fence(query),
        task=setting("task.name"),
        policy=f"policy {path.rstrip('/').rpartition('/')[2]}" if path else "the policy that the task makes",
        code_version=run.code_version, created=run.created_at[:10], query=query,
        columns="\n".join(f"| {_cell(column)} | {_cell(str(kind).lower())} |" for column, kind in types),
        imports=layout.IMPORTS, temperature=setting("search.temperature") or 1.0, top_p=setting("search.top_p") or 1.0,
    )  # fmt: skip


def _fence(text: str) -> str:
    """Return a Markdown fence that is longer than any run of backticks in the text."""
    return max(["``", *re.findall("`+", text)], key=len) + "`"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
