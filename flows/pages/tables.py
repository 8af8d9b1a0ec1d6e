"""Answers to queries as tables, and the tiles and excerpts that pages show of them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import duckdb

_MOST_ROWS = 400  # of a table on a page; of a longer table, a page shows the first and the last 200 rows

Row = tuple[Any, ...]


class Excerpt(NamedTuple):
    """The first and the last rows of a table, each with the style sheet class of the row, and how many rows between
    them are left out."""

    first: list[tuple[Row, str]]
    left_out: int
    last: list[tuple[Row, str]]


@dataclass(frozen=True)
class Table:
    """The answer to a query: the names of its columns, and its rows."""

    columns: list[str]
    rows: list[Row]

    def column(self, name: str) -> list[Any]:
        """Return the values of a column, or None for each row if the answer has no column of that name."""
        if name not in self.columns:
            return [None] * len(self.rows)
        place = self.columns.index(name)
        return [row[place] for row in self.rows]

    def points(self, name: str, *, x: str = "step") -> list[tuple[Any, Any]]:
        return list(zip(self.column(x), self.column(name), strict=True))

    def records(self) -> list[dict[str, Any]]:
        """Return the rows as dictionaries by name of column."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    @property
    def numeric(self) -> list[bool]:
        """For each column, True if it contains a number: the column is then aligned to the right."""
        return [any(isinstance(row[place], int | float) for row in self.rows) for place in range(len(self.columns))]

    def excerpt(self, classes: Sequence[str] = ()) -> Excerpt:
        rows = list(zip(self.rows, classes or [""] * len(self.rows), strict=True))
        if len(rows) <= _MOST_ROWS:
            return Excerpt(rows, 0, [])
        half = _MOST_ROWS // 2
        return Excerpt(rows[:half], len(rows) - 2 * half, rows[-half:])


class Fact(NamedTuple):
    """A tile: a name with a value. The value may link to a page, or may be a number whose sign matters."""

    name: str
    value: Any
    address: str = ""
    is_signed: bool = False


def facts(named: Iterable[tuple[str, Any]]) -> list[Fact]:
    return [Fact(name, value) for name, value in named]


def ask(con: duckdb.DuckDBPyConnection, query: str, parameters: Mapping[str, Any] | None = None) -> Table:
    found = con.execute(query, parameters)
    columns = [column[0] for column in found.description or ()]
    return Table(columns, found.fetchall())
