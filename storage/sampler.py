"""The sampler: one SELECT over the tables of the index (sql/sampler.sql says which). A run stores the one it uses."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import groupby
from typing import Any, NamedTuple

import duckdb

from tba.errors import ConfigError
from tba.types import Branch

TABLES = """
create table pool (
  trajectory_id varchar, searcher integer, seq integer, row integer, prompt_id varchar, prompt integer, content uuid,
  ord bigint, sync integer, reward double, length integer, finished boolean,
  version_start integer, version_start_attempt integer, version_step integer
);
create table queue (branch varchar, prompt_id varchar, prompt integer, used boolean);
create macro uniform(text) as (('0x' || left(md5(text), 13))::bigint + 0.5::double) / 4503599627370496::double;
"""
"""What a sampler reads. `uniform` takes the first 52 bits of the digest, so it is never 0 and never 1."""

PARAMETERS = ("seed", "step", "slots", "responses", "recent_share", "inv_temp", "newest")
BRANCHES = ("recent", "prioritised")

_CLOSED = (
    "autoinstall_known_extensions",
    "autoload_known_extensions",
    "python_enable_replacements",
    "enable_external_access",
)

_UNREPEATABLE = """
select function_name from duckdb_functions() where stability in ('VOLATILE', 'CONSISTENT_WITHIN_QUERY')
except select 'error'
"""


class Row(NamedTuple):
    """One row of a draw."""

    slot: int
    position: int
    trajectory_id: str
    prompt_id: str
    branch: Branch
    weight: float


def default_sampler() -> str:
    return files("storage").joinpath("sql/sampler.sql").read_text()


def check_sampler(sql: str) -> None:
    """Refuse, with a ConfigError, a sampler that cannot work: before anything starts."""
    with connect() as con:
        Sampler(con, sql)


def connect(threads: int = 1) -> duckdb.DuckDBPyConnection:
    """An index with nothing in it. It cannot reach files, other objects of the program or the network."""
    con = duckdb.connect(":memory:", config={"threads": threads, "temp_directory": ""})
    for setting in _CLOSED:
        con.execute(f"set {setting} = false")
    con.execute(TABLES)
    return con


class Sampler:
    """A checked sampler on an index. `rows` runs it and checks what it returns."""

    def __init__(self, con: duckdb.DuckDBPyConnection, sql: str):
        self.con, self.sql = con, sql
        self.parameters = _check_statement(con, sql)
        self._run(dict.fromkeys(PARAMETERS, 1))  # of an empty index: finds unknown names, wrong types and columns

    def rows(self, parameters: Mapping[str, float]) -> list[Row]:
        """In the order of slots and positions."""
        step = parameters["step"]
        rows = sorted(self._rows(step, parameters))
        wanted = [(slot, k) for slot in range(int(parameters["slots"])) for k in range(int(parameters["responses"]))]
        if [row[:2] for row in rows] != wanted:
            raise _error(f"step {step}: {_mismatch([row[:2] for row in rows], wanted)}")
        for slot, group in groupby(rows, key=lambda row: row.slot):
            if len({(row.prompt_id, row.branch) for row in group}) > 1:
                raise _error(f"step {step}, slot {slot}: the rows of a slot must be of one prompt and one branch")
        return rows

    def _rows(self, step: float, parameters: Mapping[str, float]) -> Iterator[Row]:
        for values in self._run(parameters):
            if None in values:
                raise _error(f"step {step}: column {Row._fields[values.index(None)]!r} is null in {values}")
            try:
                slot, position, trajectory_id, prompt_id, branch, weight = values
                row = Row(int(slot), int(position), str(trajectory_id), str(prompt_id), branch, float(weight))
            except (TypeError, ValueError):
                raise _error(f"step {step}: not a row of slot, position, …, weight: {values}") from None
            if row.branch not in BRANCHES:
                raise _error(f"step {step}, slot {slot}: branch must be one of {', '.join(BRANCHES)}, got {branch!r}")
            if not (math.isfinite(row.weight) and row.weight >= 0):
                raise _error(f"step {step}, slot {slot}: weight must be a number >= 0, got {weight}")
            yield row

    def _run(self, parameters: Mapping[str, float]) -> list[tuple[Any, ...]]:
        """The rows with the columns in our order."""
        try:
            result = self.con.execute(self.sql, {name: parameters[name] for name in self.parameters})
            names = [column[0] for column in result.description or []]
            rows = result.fetchall()
        except duckdb.Error as error:
            raise _error(str(error)) from None
        missing = [name for name in Row._fields if name not in names]
        if missing:
            raise _error(f"it must return a column {missing[0]!r}; it returns {', '.join(names)}")
        places = [names.index(name) for name in Row._fields]
        return [tuple(row[place] for place in places) for row in rows]


def _check_statement(con: duckdb.DuckDBPyConnection, sql: str) -> Sequence[str]:
    """The names of its parameters, if it is one SELECT whose result could be had again."""
    try:
        statements = con.extract_statements(sql)
    except duckdb.Error as error:
        raise _error(str(error)) from None
    kinds = [statement.type.name for statement in statements]
    if kinds != ["SELECT"]:
        raise _error(f"it must be one SELECT, got {', '.join(kinds) or 'nothing'}")
    unknown = sorted(set(statements[0].named_parameters) - set(PARAMETERS))
    if unknown:
        raise _error(f"unknown parameter ${unknown[0]}; known: {', '.join(f'${name}' for name in PARAMETERS)}")
    unrepeatable = {name for (name,) in con.execute(_UNREPEATABLE).fetchall()}
    [(tree,)] = con.execute("select json_serialize_sql($sql)", {"sql": sql}).fetchall()
    for node in _nodes(json.loads(tree)):
        if node.get("function_name") in unrepeatable:
            raise _error(f"{node['function_name']}() is not repeatable; use uniform(text)")
        if node.get("sample"):
            raise _error("TABLESAMPLE and USING SAMPLE are not repeatable; use uniform(text)")
    return sorted(statements[0].named_parameters)


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """Every object within parsed JSON."""
    if isinstance(tree, dict):
        yield tree
    for child in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from _nodes(child)


def _mismatch(found: Sequence[tuple[int, int]], wanted: Sequence[tuple[int, int]]) -> str:
    for slot, position in wanted:
        n = found.count((slot, position))
        if n != 1:
            return f"one row for every slot and position, got {n} for slot {slot}, position {position}"
    extra = next(place for place in found if place not in set(wanted))
    return f"no such place in the batch: slot {extra[0]}, position {extra[1]}"


def _error(what: str) -> ConfigError:
    return ConfigError(f"sampler SQL: {what}")
