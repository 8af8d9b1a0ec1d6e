"""SQL that people write, as DuckDB takes it: its statements, its errors in one line, its rows with texts cut."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tba.errors import ConfigError

if TYPE_CHECKING:
    import duckdb


GONE = "something that the run had when it was looked at has been removed since, as a compaction does: look at it again"


@contextmanager
def stopping(con: "duckdb.DuckDBPyConnection") -> Iterator[None]:
    """After a Ctrl-C, DuckDB's threads may go on with the query: whoever uses the connection next would wait for it."""
    try:
        yield
    except (KeyboardInterrupt, RuntimeError):
        con.interrupt()
        raise


def is_gone(error: Exception) -> bool:
    return "Failed to open local file" in str(error)


def explain(error: Exception) -> str:
    """Return what DuckDB says is wrong and where in the query, in one line."""
    message = str(error).split("\nLINE ")[0]
    if is_gone(error):
        return GONE
    said = " ".join(line.strip() for line in message.splitlines() if line.strip())
    where = re.search(r"\nLINE (\d+): (.*)", str(error))
    return f"{said} (line {where[1]}: {where[2].strip()})" if where else said


def last(con: "duckdb.DuckDBPyConnection", query: str) -> "duckdb.DuckDBPyRelation | None":
    """Run all statements; the rows of the last one, None if it is of a kind that has none."""
    statements = con.extract_statements(query)
    if not statements:
        raise ConfigError("there is no query")
    for statement in statements[:-1]:
        con.execute(statement).fetchall()
    return con.sql(statements[-1])


def with_texts_cut(rows: "duckdb.DuckDBPyRelation", most: int) -> "duckdb.DuckDBPyRelation":
    """The same rows, with at most so many characters of each text and items of each list. DuckDB cuts them before it
    hands them over, so that a huge value is neither copied nor drawn."""
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
