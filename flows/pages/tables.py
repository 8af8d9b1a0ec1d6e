"""Answers to queries, and what of them a page shows."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import duckdb

_MOST_ROWS = 400  # of a table; of a longer one a page shows the first and the last half of so many

Row = tuple[Any, ...]


class Excerpt(NamedTuple):
    """The rows of a table that a page shows, each with the class of its row in the style sheet."""

    first: list[tuple[Row, str]]
    left_out: int
    last: list[tuple[Row, str]]


@dataclass(frozen=True)
class Table:
    """An answer: names of columns, and rows."""

    columns: list[str]
    rows: list[Row]

    def column(self, name: str) -> list[Any]:
        """Return the values of a column; nulls if the run has no column of that name."""
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
        """Whether each column has a number, and so is aligned to the right."""
        return [any(isinstance(row[place], int | float) for row in self.rows) for place in range(len(self.columns))]

    def excerpt(self, classes: Sequence[str] = ()) -> Excerpt:
        rows = list(zip(self.rows, classes or [""] * len(self.rows), strict=True))
        if len(rows) <= _MOST_ROWS:
            return Excerpt(rows, 0, [])
        half = _MOST_ROWS // 2
        return Excerpt(rows[:half], len(rows) - 2 * half, rows[-half:])


class Fact(NamedTuple):
    """A tile: a name with a value, which may lead to a page, or be a number whose sign matters."""

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
