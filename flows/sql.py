"""`tba sql`: one query, or a prompt when none is given."""

import csv as csv_files
import json as json_texts
import math
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb

from flows.progress import bar, was_interrupted
from storage.run import Run
from storage.views import connect
from tba.errors import ConfigError, TBAError

_ROWS = 100  # of a table on the screen
_GREETING = """\
{url}
End a query with ';'. `show tables;` lists the views, `describe steps;` the columns of one, Ctrl-D leaves."""


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
        return prompt(run)
    with bar("copying what is new") as tell:
        con = connect(run, progress=tell)
    with naming_errors():
        rows = _last(con, query)
        if csv:
            _print_csv(rows)
        elif json:
            _print_json(rows)
        elif target:
            _write_parquet(rows, target)
        else:
            _print_table(rows)
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
def naming_errors() -> Iterator[None]:
    """What DuckDB refuses, as one line."""
    try:
        yield
    except duckdb.Error as error:
        raise ConfigError(explain(error)) from error


def explain(error: duckdb.Error) -> str:
    """The message without the excerpt of the query below it."""
    message = str(error).split("\nLINE ")[0]
    return " ".join(line.strip() for line in message.splitlines() if line.strip())


def _last(con: duckdb.DuckDBPyConnection, query: str) -> duckdb.DuckDBPyRelation:
    """Run all statements; the rows of the last one."""
    statements = con.extract_statements(query)
    if not statements:
        raise ConfigError("there is no query")
    for statement in statements[:-1]:
        con.execute(statement).fetchall()
    rows = con.sql(statements[-1])
    if rows is None:
        raise ConfigError("the last statement has no rows to show")
    return rows


# --- forms of an answer ---------------------------------------------------------------------------------------------


def _print_table(rows: duckdb.DuckDBPyRelation) -> None:
    if rows.columns in (["explain_key", "explain_value"], ["analyzed_plan"]):
        print("\n".join(text for _, text in rows.fetchall()))
    else:
        rows.show(max_rows=_ROWS, max_width=shutil.get_terminal_size((160, 40)).columns)


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


# --- the prompt -----------------------------------------------------------------------------------------------------


def prompt(run: Run) -> int:
    """Questions until there are no more; each is answered from what is stored by then."""
    history = _remember()
    print(_GREETING.format(url=run.url))
    while (query := _ask()) is not None:
        try:
            with bar("copying what is new") as tell:
                con = connect(run, progress=tell)
            _print_table(_last(con, query))
        except duckdb.Error as error:
            print(f"error: {error}", file=sys.stderr)
        except TBAError as error:
            print(f"error: {error}", file=sys.stderr)
        except (KeyboardInterrupt, RuntimeError) as error:
            if not was_interrupted(error):
                raise
            print("interrupted", file=sys.stderr)
    if history:
        history()
    return 0


def _ask() -> str | None:
    """The next query, of as many lines as it takes; None when there is no more. Ctrl-C forgets a line."""
    lines: list[str] = []
    while True:
        try:
            line = input("tba> " if not lines else "...> ")
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print()
            lines = []
            continue
        if not lines and line.strip().lower().rstrip(";") in ("exit", "quit", ".exit", ".quit", r"\q"):
            return None
        if line.strip():
            lines.append(line)
        if lines and line.rstrip().endswith(";"):
            return "\n".join(lines)


def _remember() -> Any:
    """Keep what was asked for the next time, where the terminal can."""
    try:
        import readline
    except ImportError:
        return None
    from storage.cache import cache_folder

    path = cache_folder("prompt") / "history"
    with suppress(OSError):
        readline.read_history_file(path)

    def save() -> None:
        readline.set_history_length(1000)
        with suppress(OSError):
            readline.write_history_file(path)
            os.chmod(path, 0o600)

    return save
