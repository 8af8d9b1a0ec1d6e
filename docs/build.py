"""Generate the parts of the pages in docs/ that follow from the code or from a run.

python -m docs.build            writes docs/sql.md from storage/queries/sql/comments.sql; docs/settings.md and
                                docs/commands.md from the docstrings of settings and the help texts of commands;
                                docs/monitoring.md from the catalogue of metrics; and the tables and chart of
                                docs/choosing.md from docs/results/old-data-quickstart.csv
python -m docs.build RUN        also writes the answers in docs/queries.md, from that run
"""

import io
import re
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import duckdb

import storage
from benchmarks.harness.rows import read
from benchmarks.science.old_data import arms, results
from docs import reference as references
from storage.runs.run import Run

HERE = Path(__file__).parent
SQL, QUERIES = HERE / "sql.md", HERE / "queries.md"
SETTINGS, COMMANDS, MONITORING = HERE / "settings.md", HERE / "commands.md", HERE / "monitoring.md"
CHOOSING, CHART = HERE / "choosing.md", HERE / "results/old-data-quickstart-lags.svg"
STUDY = HERE / "results/old-data-quickstart.csv"
MARK = re.compile("<!-- What follows is made by `python -m docs.build` from .* -->\n")
EXAMPLE = {
    "eligible_at": "0",
    "group_of": "''",
    "learned_from": "1",
    "pass_at": "1",
    "selection_by": "'length'",
    "stale": "0",
    "trajectory": "''",
}
"""Arguments for those macros that need some."""

_TYPES = {"varchar": "text", "varchar[]": "text[]", "map(varchar, double)": "map(text, double)"}
_ELSEWHERE = ("trajectories", "draws", "prompts")  # views that describe columns of the same name in macros
_QUERY = re.compile(r"```sql\n(?P<query>.*?)```\n(?:\n```\n.*?```\n)?", re.S)


def main(arguments: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        empty = Run.create(folder, "empty", config={}, sampler_sql="", code_version="")
        write(SQL, reference(storage.connect(empty)))
    write(SETTINGS, references.settings())
    write(COMMANDS, references.commands())
    write(CHOOSING, tables())
    CHART.write_text(chart())
    write(MONITORING, references.metrics())
    if arguments:
        con = storage.connect(arguments[0])
        QUERIES.write_text(answered(QUERIES.read_text(), lambda query: shown(con, query)))


def made(page: Path) -> str:
    """Return the generated part of a page."""
    return MARK.split(page.read_text(), maxsplit=1)[1]


def write(page: Path, text: str) -> None:
    page.write_text(page.read_text().removesuffix(made(page)) + text)


# --- docs/sql.md ----------------------------------------------------------------------------------------------------


def reference(con: duckdb.DuckDBPyConnection) -> str:
    """Return the reference of all views and macros, with the types and meanings of their columns."""
    entries = con.execute("select name, type, meaning from help()").fetchall()
    views = [_view(con, name, meaning) for name, kind, meaning in entries if kind == "view"]
    macros = [_macro(con, name, meaning) for name, kind, meaning in entries if kind == "macro"]
    return "\n## Views\n\n" + "\n".join(views) + "\n## Macros\n\n" + "\n".join(macros)


def _view(con: duckdb.DuckDBPyConnection, name: str, meaning: str) -> str:
    columns = _help(con, name)
    if name.endswith("_all"):  # columns that it shares with the view of the shorter name are described there
        columns = [it for it in columns if it not in _help(con, name.removesuffix("_all"))]
    return f"### {name}\n\n{meaning}\n\n" + _table("column", [(it, _type(kind), said) for it, kind, said in columns])


def _macro(con: duckdb.DuckDBPyConnection, signature: str, meaning: str) -> str:
    name = signature.partition("(")[0]
    entries = _help(con, name)
    parameters = [(it, "", meaning) for it, kind, meaning in entries if kind == "parameter"]
    meanings = {it: text for view in reversed(_ELSEWHERE) for it, _, text in _help(con, view)}
    meanings |= {it: text for it, kind, text in entries if kind == "column"}
    described = con.execute(f"describe from {name}({EXAMPLE.get(name, '')})").fetchall()
    columns = [(it[0], _type(it[1].lower()), meanings[it[0]]) for it in described]
    return (
        f"### {signature}\n\n{meaning}\n\n"
        + (_table("parameter", parameters) + "\n" if parameters else "")
        + _table("column", columns)
    )


def _help(con: duckdb.DuckDBPyConnection, name: str) -> list[tuple[str, str, str]]:
    query = "select name, type, meaning from help(?) where type not in ('view', 'macro')"
    return con.execute(query, [name]).fetchall()


def _type(kind: str) -> str:
    return _TYPES.get(kind, kind)


def _table(title: str, rows: list[tuple[str, str, str]]) -> str:
    typed = any(kind for _, kind, _ in rows)
    head = f"| {title} | type | |\n|---|---|---|\n" if typed else f"| {title} | |\n|---|---|\n"
    return head + "".join(f"| {it} | {f'{kind} | ' if typed else ''}{said} |\n" for it, kind, said in rows)


# --- docs/choosing.md -------------------------------------------------------------------------------------------------


def tables() -> str:
    """Return all tables of the study of old data."""
    return "\n".join(results.markdown(arms.STUDIES["quickstart"], read(STUDY, arms.Row))) + "\n"


def chart() -> str:
    return results.picture(arms.STUDIES["quickstart"], read(STUDY, arms.Row))


# --- docs/queries.md ------------------------------------------------------------------------------------------------


def queries(page: str) -> list[str]:
    return [found["query"] for found in _QUERY.finditer(page)]


def answered(page: str, answer: Callable[[str], str]) -> str:
    """Return the page with the answer of each query below the query."""
    return _QUERY.sub(lambda found: f"```sql\n{found['query']}```\n\n```\n{answer(found['query'])}```\n", page)


def shown(con: duckdb.DuckDBPyConnection, query: str) -> str:
    """Return the answer of a query as `tba sql` prints it."""
    with redirect_stdout(io.StringIO()) as said:
        con.sql(query).show(max_rows=40, max_width=118)
    return "\n".join(line.rstrip() for line in said.getvalue().strip("\n").splitlines()) + "\n"


if __name__ == "__main__":
    main(sys.argv[1:])
