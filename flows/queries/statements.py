"""Helpers for SQL that people write: run its statements, explain errors in one line, cut long texts of rows."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tba.errors import ConfigError

if TYPE_CHECKING:
    import duckdb


GONE = "an object of the run has been removed since the run was read, for example by a compaction: read the run again"


@contextmanager
def stopping(con: "duckdb.DuckDBPyConnection") -> Iterator[None]:
    """Interrupt the query after a Ctrl-C. Otherwise DuckDB's threads may go on with it, and the next query on the same
    connection would wait for them."""
    try:
        yield
    except (KeyboardInterrupt, RuntimeError):
        con.interrupt()
        raise


def is_gone(error: Exception) -> bool:
    return "Failed to open local file" in str(error)


def explain(error: Exception) -> str:
    """Return in one line what is wrong and where in the query, as DuckDB reports it."""
    message = str(error).split("\nLINE ")[0]
    if is_gone(error):
        return GONE
    reason = " ".join(line.strip() for line in message.splitlines() if line.strip())
    where = re.search(r"\nLINE (\d+): (.*)", str(error))
    return f"{reason} (line {where[1]}: {where[2].strip()})" if where else reason


def last(con: "duckdb.DuckDBPyConnection", query: str) -> "duckdb.DuckDBPyRelation | None":
    """Run all statements. Return the rows of the last one, or None if a statement of its kind has no rows."""
    statements = con.extract_statements(query)
    if not statements:
        raise ConfigError("there is no query")
    for statement in statements[:-1]:
        con.execute(statement).fetchall()
    return con.sql(statements[-1])


def with_texts_cut(rows: "duckdb.DuckDBPyRelation", most: int) -> "duckdb.DuckDBPyRelation":
    """Return the same rows with at most `most` characters of each text and items of each list. DuckDB cuts the values
    before it returns them, so that a huge value is neither copied nor shown."""
    cut = {"varchar": f"left({{}}, {most})", "list": f"{{}}[:{most}]"}
    columns = enumerate(zip(rows.columns, rows.types, strict=True), start=1)
    return rows.project(
        ", ".join(f"{cut.get(kind.id, '{}').format(f'#{n}')} as {_quoted(name)}" for n, (name, kind) in columns)
    )


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def check_names(option: str, names: Sequence[str]) -> None:
    twice = [name for name, n in Counter(names).items() if n > 1]
    if twice:
        raise ConfigError(f"{option}: {twice[0]!r} names more than one column; give each a name with AS")
