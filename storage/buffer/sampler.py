"""The sampler: one SELECT over the tables of the index, which storage/buffer/sampler.sql describes. Each run
stores its sampler."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import groupby
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa

from tba.errors import ConfigError
from tba.types import Branch

_CHANCE = """
create macro uniform(text) as (('0x' || left(md5(text), 13))::bigint + 0.5::double) / 4503599627370496::double
"""
"""The SQL function `uniform(text)`: a number between 0 and 1, made from the first 52 bits of the text's md5. It is
never exactly 0 or 1."""

_ROWS = """
create or replace view {name} as
select
  concat_ws('/', searcher, seq, row) as trajectory_id,
  searcher::integer as searcher, seq::integer as seq, row::integer as row,
  prompt_id::varchar as prompt_id, prompt::integer as prompt, content::uuid as content,
  ord::bigint as ord, sync::integer as sync,
  reward::double as reward, length::integer as length, finished::boolean as finished,
  version_start::integer as version_start, version_start_attempt::integer as version_start_attempt,
  version_step::integer as version_step
from {name}_laid{only}
"""
_TABLES = {
    "pool": _ROWS.replace("{only}", " where drawable = 1"),
    "front": _ROWS.replace("{only}", ""),
    "queue": """
create or replace view {name} as
select branch::varchar as branch, prompt_id::varchar as prompt_id, prompt::integer as prompt, used::boolean as used
from {name}_laid
""",
    "turns": """
create or replace view {name} as
select branch::varchar as branch, turn::integer as turn, prompt_id::varchar as prompt_id, prompt::integer as prompt
from {name}_laid
""",
}
"""The tables that a sampler reads. Each is a view of `{name}_laid`, so that `trajectory_id` is computed only if the
sampler reads it."""

PARAMETERS = ("seed", "step", "slots", "responses", "recent_share", "inv_temp", "newest")
BRANCHES: tuple[Branch, ...] = ("recent", "prioritised")

_CLOSED = ("autoinstall_known_extensions", "autoload_known_extensions", "enable_external_access")

_UNREPEATABLE = """
select function_name from duckdb_functions() group by all
having bool_or(stability = 'VOLATILE') or bool_and(stability = 'CONSISTENT_WITHIN_QUERY')
  or bool_or(macro_definition like '%current_%')
  or function_name like 'approx_%'
  or function_name in (
    'age', 'current_localtime', 'current_localtimestamp', 'current_setting', 'getvariable', 'hash',
    'reservoir_quantile', 'version'
  )
except select 'error'
"""
"""Query for the functions that may give another result when the same draw is repeated: those that DuckDB marks as such,
those that read the clock or settings, and those whose result may differ in another version of DuckDB. Since DuckDB 2.0,
functions such as `+` and `range` have some forms, with times that have a time zone, whose result is the same only
within a query. Their other forms are repeatable, so these functions are allowed."""

_EXAMPLES_ROWS = """
select
  ord // 48 as searcher, ord // 12 as seq, ord % 12 as row, concat('train/', ord % 6) as prompt_id, ord % 6 as prompt,
  md5(ord::varchar)::uuid as content, ord, ord // 24 as sync, ord % 4 // 2 as reward, 5 as length, true as finished,
  ord // 24 as version_start, 1 as version_start_attempt, ord // 12 as version_step, 1 as drawable
from range(96) as t(ord) order by ord * {direction}
"""
_EXAMPLE = {
    "pool": _EXAMPLES_ROWS,
    "front": _EXAMPLES_ROWS,
    "queue": """
select branch, concat('train/', prompt) as prompt_id, prompt, false as used
from (values ('recent'), ('prioritised')) as b(branch), range(6) as t(prompt) order by prompt * {direction}
""",
    "turns": """
select branch, turn, concat('train/', turn + first) as prompt_id, turn + first as prompt
from (values ('recent', 0), ('prioritised', 3)) as b(branch, first), range(3) as t(turn) order by turn * {direction}
""",
}
_EXAMPLES_PARAMETERS = {
    "seed": 0, "step": 9, "slots": 3, "responses": 2, "recent_share": 0.5, "inv_temp": 1.0, "newest": 3,
}  # fmt: skip

_CLOCKS = ("current_date", "current_time", "current_timestamp", "localtime", "localtimestamp")
_GENERATORS = ("range", "generate_series", "unnest")


class Row(NamedTuple):
    """One row that a sampler returns: the trajectory for one place in the batch."""

    slot: int
    position: int
    trajectory_id: str
    prompt_id: str
    branch: Branch
    weight: float


def default_sampler() -> str:
    return files("storage.buffer").joinpath("sampler.sql").read_text()


def check_sampler(sql: str) -> None:
    """Raise ConfigError if a sampler is not one SELECT over the tables of the index, if it uses something that cannot
    be repeated, or if it draws otherwise when the rows of an example lie in another order. Call this before anything
    starts."""
    sampler = Sampler(Tables(), sql)
    forwards, backwards = (_try(sampler, direction) for direction in (1, -1))
    if forwards != backwards:
        raise _error(
            "what it draws depends on the order in which rows happen to lie: give limit, row_number() and the like an "
            "ORDER BY without ties (ord differs between any two rows)"
        )


def _try(sampler: "Sampler", direction: int) -> list[tuple[Any, ...]] | None:
    """Return the rows that a sampler draws from an example, without the weights. `direction` (1 or -1) is the order of
    the example's rows. Return None if the sampler fails on the example, which is allowed; then there is nothing to
    compare."""
    sampler.tables.lay_example(direction)
    try:
        return sorted(row[:5] for row in sampler.rows(_EXAMPLES_PARAMETERS))
    except ConfigError:
        return None


class Tables:
    """The tables that samplers read, empty at first. Samplers cannot read files, other Python objects or the
    network."""

    def __init__(self, threads: int = 1):
        self.con = duckdb.connect(":memory:", config={"threads": threads, "temp_directory": ""})
        self._laid: dict[str, _Laid] = {}
        for setting in _CLOSED:
            self.con.execute(f"set {setting} = false")
        self.con.execute(_CHANCE)
        self.lay_example(rows=0)
        for name, view in _TABLES.items():
            self.con.execute(view.format(name=name))

    def lay(self, name: str, rows: pa.Table) -> None:
        """Replace the rows of a table."""
        laid = self._laid.get(name)
        if laid and laid.rows.schema.equals(rows.schema):
            laid.rows = rows
        else:
            self._laid[name] = _Laid(rows)
            self.con.register(f"{name}_laid", self._laid[name])

    def lay_example(self, direction: int = 1, rows: int | None = None) -> None:
        for name, query in _EXAMPLE.items():
            self.lay(name, self.con.sql(query.format(direction=direction)).to_arrow_table().slice(0, rows))


class _Laid:
    """Rows that DuckDB reads anew from this object for each query, so they can be replaced without registering a new
    table. Registering takes longer, and a thread of the trainer would have to wait for it."""

    def __init__(self, rows: pa.Table):
        self.rows = rows

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.rows.__arrow_c_stream__(requested_schema)


class Sampler:
    """A sampler and the tables that it reads. The constructor checks the sampler and raises ConfigError; `rows` runs it
    and checks its result."""

    def __init__(self, tables: Tables, sql: str):
        self.tables, self.sql = tables, sql
        self.parameters, self.reads = _check_statement(tables.con, sql)
        self._execute(f"prepare sampler as {sql}")
        self._run(dict.fromkeys(PARAMETERS, 1))  # finds unknown names, wrong types and missing columns

    def rows(self, parameters: Mapping[str, float]) -> list[Row]:
        """Return the rows of a draw, sorted by slot and position. Raise ConfigError if there is not one valid row for
        each place."""
        step = parameters["step"]
        rows = sorted(self._rows(step, parameters))
        wanted = [(slot, k) for slot in range(int(parameters["slots"])) for k in range(int(parameters["responses"]))]
        if [row[:2] for row in rows] != wanted:
            raise _error(f"step {step}: {_mismatch([row[:2] for row in rows], wanted)}")
        for slot, group in groupby(rows, key=lambda row: row.slot):
            if len({(row.prompt_id, row.branch) for row in group}) > 1:
                raise _error(f"step {step}, slot {slot}: the rows of a slot must have one prompt and one branch")
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
        """Run the statement, and return its rows with the columns in the order of `Row`."""
        arguments = ", ".join(f"{name} := {_literal(parameters[name])}" for name in self.parameters)
        names, rows = self._execute(f"execute sampler({arguments})" if arguments else "execute sampler")
        missing = [name for name in Row._fields if name not in names]
        if missing:
            raise _error(f"it must return a column {missing[0]!r}; it returns {', '.join(names)}")
        places = [names.index(name) for name in Row._fields]
        return [tuple(row[place] for place in places) for row in rows]

    def _execute(self, statement: str) -> tuple[list[str], list[tuple[Any, ...]]]:
        """Run a statement, and return the names of its columns and its rows. Raise ConfigError if DuckDB reports an
        error."""
        try:
            result = self.tables.con.execute(statement)
            return [column[0] for column in result.description or []], result.fetchall()
        except duckdb.Error as error:
            raise _error(str(error)) from None


def _literal(value: float) -> str:
    """Return a number as SQL. The DuckDB client could bind the value, but it looks for pandas at each value that it
    binds, which would delay the trainer by milliseconds."""
    return str(value) if isinstance(value, int) else f"'{value!r}'::double"


def _check_statement(con: duckdb.DuckDBPyConnection, sql: str) -> tuple[Sequence[str], set[str]]:
    """Return the names of a sampler's parameters and of the tables that it reads. Raise ConfigError if the sampler is
    not one SELECT, or if its result could not be repeated."""
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
    [(tree,)] = con.execute("select json_serialize_sql($sql)", {"sql": sql}).fetchall()
    parsed = json.loads(tree)
    if parsed["error"]:
        raise _error(f"DuckDB cannot show its syntax tree, so it cannot be checked: {parsed['error_message']}")
    nodes = list(_nodes(parsed))
    _check_functions(con, nodes)
    _check_sources(nodes)
    read = {str(node["table_name"]).lower() for node in nodes if node.get("type") == "BASE_TABLE"}
    return sorted(statements[0].named_parameters), read & _TABLES.keys()


def _check_functions(con: duckdb.DuckDBPyConnection, nodes: Sequence[Mapping[str, Any]]) -> None:
    unrepeatable = {name for (name,) in con.execute(_UNREPEATABLE).fetchall()}
    for node in nodes:
        name = str(node.get("function_name", "")).lower()
        if name in unrepeatable:
            raise _error(f"{name}() is not repeatable; use uniform(text)")
        columns = [str(column).lower() for column in node.get("column_names", ())]
        if len(columns) == 1 and columns[0] in _CLOCKS:
            raise _error(f"{columns[0]} is not repeatable; use uniform(text)")
        if node.get("sample"):
            raise _error("TABLESAMPLE and USING SAMPLE are not repeatable; use uniform(text)")


def _check_sources(nodes: Sequence[Mapping[str, Any]]) -> None:
    """Raise ConfigError unless all rows come from the index, from the statement's own subqueries or from number
    generators. Other tables and table functions of DuckDB reveal the process or run SQL that has not been checked."""
    own = {entry["key"].lower() for node in nodes for entry in (node.get("cte_map") or {}).get("map", ())}
    for node in nodes:
        kind = node.get("type")
        if kind == "BASE_TABLE" and (node["schema_name"] or node["table_name"].lower() not in {*_TABLES, *own}):
            name = ".".join(filter(None, (node["schema_name"], node["table_name"])))
            raise _error(f"it can read {', '.join(_TABLES)}, not {name}")
        if kind == "TABLE_FUNCTION" and node["function"]["function_name"].lower() not in _GENERATORS:
            raise _error(f"it can read {', '.join(_TABLES)}, not {node['function']['function_name']}(…)")
        if kind == "SHOW_REF":
            raise _error(f"it can read {', '.join(_TABLES)}, not what SHOW and DESCRIBE return")


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield all dicts in parsed JSON, including nested ones."""
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
