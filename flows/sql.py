"""`tba sql`: one query, or a prompt when none is given."""

import csv as csv_files
import json as json_texts
import math
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb

from flows.damage import culprits, warn
from flows.progress import bar
from storage.run import Run
from storage.views import connect
from tba.errors import ConfigError, Damaged

_ROWS = 100  # of a table on the screen


def answer(
    run: Run,
    query: str | None,
    file: str | None,
    *,
    csv: bool = False,
    json: bool = False,
    parquet: str | None = None,
) -> int:
    """Answer a query in the form asked for; a prompt if there is none and somebody to ask."""
    target = Path(parquet) if parquet else None
    if target and target.exists():
        raise ConfigError(f"--parquet: {parquet} exists already")
    query = query if query is not None else _read(file)
    if query is None:
        from flows.prompt import prompt

        return prompt(run)
    with bar("copying what is new") as tell:
        con = connect(run, progress=tell)
    warn(run, con)
    with naming_errors(run), stopping(con):
        rows = last(con, query)
        if rows is None:
            raise ConfigError("the last statement has no rows to show")
        if json or target:
            check_names("--json" if json else "--parquet", rows.columns)
        if csv:
            _print_csv(rows)
        elif json:
            _print_json(rows)
        elif target:
            _write_parquet(rows, target)
        else:
            print_table(rows)
    return 0


def _read(file: str | None) -> str | None:
    if file == "-" or (file is None and not sys.stdin.isatty()):
        return sys.stdin.read()
    if file is None:
        return None
    try:
        return Path(file).read_text()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not text: {error.reason} at byte {error.start}") from None


@contextmanager
def naming_errors(run: Run) -> Iterator[None]:
    """What DuckDB refuses, as one line. Where an object of the run is damaged inside, the line names it."""
    try:
        yield
    except duckdb.Error as error:
        if at_fault := culprits(run, error):
            raise Damaged(explain(error) + at_fault) from error
        raise ConfigError(explain(error)) from error


@contextmanager
def stopping(con: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """After a Ctrl-C, DuckDB's threads may go on with the query: whoever uses the connection next would wait for it."""
    try:
        yield
    except (KeyboardInterrupt, RuntimeError):
        con.interrupt()
        raise


GONE = "something that the run had when it was looked at has been removed since, as a compaction does: look at it again"


def is_gone(error: Exception) -> bool:
    return isinstance(error, duckdb.Error) and "Failed to open local file" in str(error)


def explain(error: duckdb.Error) -> str:
    """The message in one line, and where in the query."""
    message = str(error).split("\nLINE ")[0]
    if is_gone(error):
        return GONE
    said = " ".join(line.strip() for line in message.splitlines() if line.strip())
    where = re.search(r"\nLINE (\d+): (.*)", str(error))
    return f"{said} (line {where[1]}: {where[2].strip()})" if where else said


def last(con: duckdb.DuckDBPyConnection, query: str) -> duckdb.DuckDBPyRelation | None:
    """Run all statements; the rows of the last one, None if it is of a kind that has none."""
    statements = con.extract_statements(query)
    if not statements:
        raise ConfigError("there is no query")
    for statement in statements[:-1]:
        con.execute(statement).fetchall()
    return con.sql(statements[-1])


# --- forms of an answer ---------------------------------------------------------------------------------------------


def print_table(rows: duckdb.DuckDBPyRelation) -> None:
    if rows.columns in (["explain_key", "explain_value"], ["analyzed_plan"]):
        print("\n".join(text for _, text in rows.fetchall()))
    else:
        rows.show(max_rows=_ROWS, max_width=shutil.get_terminal_size((160, 40)).columns)


def check_names(option: str, names: Sequence[str]) -> None:
    twice = [name for name, n in Counter(names).items() if n > 1]
    if twice:
        raise ConfigError(f"{option}: {twice[0]!r} names more than one column; give each a name with AS")


def _print_csv(rows: duckdb.DuckDBPyRelation) -> None:
    out = csv_files.writer(sys.stdout, lineterminator="\n")
    out.writerow(rows.columns)
    for row in rows.fetchall():
        out.writerow(
            [json_texts.dumps(cell) if isinstance(cell, list | dict | bool) else cell for cell in map(_plain, row)]
        )


def _print_json(rows: duckdb.DuckDBPyRelation) -> None:
    """A list of objects, one a line."""
    names, first = rows.columns, True
    for row in rows.fetchall():
        print("[" if first else ",")
        first = False
        print(json_texts.dumps(dict(zip(names, map(_plain, row), strict=True)), ensure_ascii=False), end="")
    print("[]" if first else "\n]")


def _write_parquet(rows: duckdb.DuckDBPyRelation, target: Path) -> None:
    import pyarrow.parquet as pq

    table = rows.to_arrow_table()
    try:
        with target.open("xb") as file:
            pq.write_table(table, file, compression="zstd")
    except OSError as error:
        raise ConfigError(f"--parquet: {target}: {error.strerror}") from None
    print(f"{table.num_rows} rows in {target}")


def _plain(value: Any) -> Any:
    """A value as JSON knows it; a float that is no number becomes null."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value)
