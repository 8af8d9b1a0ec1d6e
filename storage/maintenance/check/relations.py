"""Checks that the rows of a run agree with each other: runs the queries of relations.sql over what the checkers have
read."""

from collections import defaultdict
from collections.abc import Collection
from importlib.resources import files
from typing import Any

import duckdb
import pyarrow as pa

from tba.types import Version

CHECK_SQL = files("storage.maintenance.check").joinpath("relations.sql").read_text()

_SHOWN = 20  # number of problems of one kind that are shown; the others are only counted
_OF_TRAJECTORIES = (
    "trajectory_id", "searcher", "round", "slot", "prompt_id", "version_start", "version_start_attempt",
    "version_end", "version_end_attempt",
)  # fmt: skip
_TEXT = {"trajectory_id", "prompt_id", "key", "steps_key", "draws_key"}
_TABLES = {
    "trajectories": (*_OF_TRAJECTORIES, "sync", "step"),
    "shards": ("searcher", "seq", "rows", "sync", "step"),
    "prompts": ("prompt_id",),
    "steps": ("step", "key", "sync"),
    "drawn": ("step", "slot", "position", "trajectory_id", "prompt_id", "key", "sync"),
    "readable": ("key",),
    "recorded": ("sync", "first_step", "last_step", "steps_key", "draws_key"),
    "published": ("number", "attempt"),
    "numbers": ("slots", "responses"),
}

_PLACES_OF_DRAWS = """
create table draws as
select
    *,
    try_cast(split_part(trajectory_id, '/', 1) as bigint) as searcher,
    try_cast(split_part(trajectory_id, '/', 2) as bigint) as seq,
    try_cast(split_part(trajectory_id, '/', 3) as bigint) as row
from drawn
"""


class Relations:
    """Collects the rows of readable objects, with the columns that the queries need."""

    def __init__(self, *, slots: int | None, responses: int | None):
        self.rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.tables: dict[str, list[pa.Table]] = defaultdict(list)
        self.rows["numbers"].append({"slots": slots, "responses": responses})

    def add_shard(self, searcher: int, seq: int, rows: int, *, sync: int, step: int) -> None:
        """Add what a sync record says about a shard that it admits."""
        shard = {"searcher": searcher, "seq": seq, "rows": rows, "sync": sync, "step": step}
        self.rows["shards"].append(shard)

    def add_trajectories(self, table: pa.Table, *, sync: int | None, step: int | None) -> None:
        self._add("trajectories", table, sync=sync, step=step)

    def add_prompts(self, table: pa.Table, *, key: str) -> None:
        self._add("prompts", table)
        self.rows["readable"].append({"key": key})

    def add_steps(self, table: pa.Table, *, key: str, sync: int) -> None:
        self._add("steps", table, key=key, sync=sync)
        self.rows["readable"].append({"key": key})

    def add_draws(self, table: pa.Table, *, key: str, sync: int) -> None:
        self._add("drawn", table, key=key, sync=sync)
        self.rows["readable"].append({"key": key})

    def add_sync(self, sync: int, steps: range, *, steps_key: str, draws_key: str) -> None:
        """Add which steps the ledger of a sync must have, and in which objects."""
        record = {"sync": sync, "first_step": steps[0], "last_step": steps[-1]}
        self.rows["recorded"].append({**record, "steps_key": steps_key, "draws_key": draws_key})

    def add_published(self, versions: Collection[Version]) -> None:
        self.rows["published"] += [{"number": version.number, "attempt": version.attempt} for version in versions]

    def count(self, name: str) -> int:
        return sum(map(len, self.tables[name]))

    def problems(self) -> list[tuple[str, str]]:
        """Run the queries of relations.sql. Return, for each row of their results, the key of an object and what is
        wrong with the object. Of each query, at most `_SHOWN` rows are returned, and then the number of the others."""
        problems: list[tuple[str, str]] = []
        with duckdb.connect(":memory:", config={"temp_directory": ""}) as con:
            for name in _TABLES:
                con.from_arrow(self._table(name)).create(name)
            con.execute(_PLACES_OF_DRAWS)
            for statement in con.extract_statements(CHECK_SQL):
                rows = con.execute(statement).fetchall()
                problems += rows[:_SHOWN]
                if len(rows) > _SHOWN:
                    problems.append((rows[_SHOWN][0], f"… and {len(rows) - _SHOWN} more like this"))
        return problems

    def _add(self, name: str, table: pa.Table, **known: Any) -> None:
        """Add those columns of a table that the queries need. `known` has the columns whose value is the same in all
        rows."""
        schema = _schema(name)
        columns = [
            pa.array([known[field.name]] * len(table), field.type)
            if field.name in known
            else table[field.name].cast(field.type)
            for field in schema
        ]
        self.tables[name].append(pa.table(columns, schema=schema))

    def _table(self, name: str) -> pa.Table:
        rows = pa.Table.from_pylist(self.rows[name], _schema(name))
        return pa.concat_tables([rows, *self.tables[name]])


def _schema(name: str) -> pa.Schema:
    return pa.schema({column: pa.string() if column in _TEXT else pa.int64() for column in _TABLES[name]})
