"""`tba sql`: answer one query, or open a prompt if no query is given."""

import argparse
import os
import secrets
import sys
from contextlib import closing
from pathlib import Path

from flows.commands.arguments import RUN_HELP, explain, open_run
from flows.progress import bar
from flows.queries.damage_report import damage_by, refusal, warn_of
from flows.queries.query_process import QueryProcess, print_answer
from storage.runs.run import Run
from tba.errors import ConfigError, QueryFailed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    explain(
        parser,
        "`from help()` lists the views, such as trajectories, steps and draws, and the macros for common questions;\n"
        "`from help('draws')` explains one of them. The dialect is that of DuckDB. Queries can read this run and\n"
        "nothing else. Without QUERY a prompt opens.",
        "examples:\n"
        '  tba sql first "select version_start, avg(reward) from trajectories group by 1 order by 1"\n'
        '  tba sql first "select * from evaluations" --csv\n'
        "  tba sql first -f question.sql --parquet answer.parquet",
    )
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument(
        "query", metavar="QUERY", nargs="?", help="one or more statements; the result of the last one is shown"
    )
    parser.add_argument("-f", "--file", metavar="FILE", help="read the query from a file; - is standard input")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="print comma-separated values with a header")
    form.add_argument("--json", action="store_true", help="print a list of rows")
    form.add_argument("--parquet", metavar="FILE", help="write the rows to a new Parquet file")


def command(options: argparse.Namespace) -> int:
    if options.query and options.file:
        raise ConfigError("-f: there is a QUERY already; only one of them can be answered")
    return answer(
        open_run(options.run), options.query, options.file, csv=options.csv, json=options.json, parquet=options.parquet
    )


def answer(
    run: Run,
    query: str | None,
    file: str | None,
    *,
    csv: bool = False,
    json: bool = False,
    parquet: str | None = None,
) -> int:
    """Print the answer to a query in the requested form, or write it to a Parquet file. Without `query` and `file`,
    open a prompt if standard input is a terminal, else read the query from standard input."""
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


def _write_parquet(queries: QueryProcess, query: str, target: Path) -> int:
    """Write the answer to a Parquet file and return its number of rows. The file appears only once it is complete."""
    part = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        count = queries.ask("write", query=query, form="parquet", width=0, path=str(part), must_have_rows=True)
        if target.exists():
            raise ConfigError(f"--parquet: {target} exists already")
        part.rename(target)
    finally:
        part.unlink(missing_ok=True)
    return count
