"""`tba sql`: one query, or a prompt when none is given."""

import os
import secrets
import shutil
import sys
from contextlib import closing
from pathlib import Path

from flows.progress import bar
from flows.queries.damage_report import damage_by, refusal, warn_of
from flows.queries.query_process import QueryProcess
from storage.runs.run import Run
from tba.errors import ConfigError, QueryFailed


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
        from flows.commands.sql_prompt import prompt

        return prompt(run)
    with closing(QueryProcess(run.url)) as queries:
        with bar("copying what is new") as tell:
            queries.start(tell)
        warn_of(run, damage_by(queries))
        try:
            if target:
                print(f"{_write_parquet(queries, query, target)} rows in {target}")
            else:
                print_answer(queries, query, "csv" if csv else "json" if json else "table", must_have_rows=True)
        except QueryFailed as error:
            raise refusal(run, error) from error
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


def print_answer(queries: QueryProcess, query: str, form: str, *, must_have_rows: bool = False) -> None:
    """Print the rows of the last statement, as they come."""
    width = shutil.get_terminal_size((160, 40)).columns
    queries.ask(
        "write",
        query=query,
        form=form,
        width=width,
        path=None,
        must_have_rows=must_have_rows,
        write=sys.stdout.write,
    )


def _write_parquet(queries: QueryProcess, query: str, target: Path) -> int:
    """Write a file that appears when all of it is there, and return how many rows it has."""
    part = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        count = queries.ask("write", query=query, form="parquet", width=0, path=str(part), must_have_rows=True)
        if target.exists():
            raise ConfigError(f"--parquet: {target} exists already")
        part.rename(target)
    finally:
        part.unlink(missing_ok=True)
    return count
