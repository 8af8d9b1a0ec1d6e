"""The parts of the pages here that follow from the code and from a run.

python -m docs.build            docs/sql.md: what storage/queries/sql/comments.sql says of views and macros;
                                docs/settings.md and docs/commands.md: what settings and commands say of themselves
python -m docs.build RUN        docs/queries.md too: every query's answer, from that run
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
from docs import reference as references
from storage.runs.run import Run

HERE = Path(__file__).parent
SQL, QUERIES = HERE / "sql.md", HERE / "queries.md"
SETTINGS, COMMANDS = HERE / "settings.md", HERE / "commands.md"
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
"""Arguments for the macros that cannot do without."""

_TYPES = {"varchar": "text", "varchar[]": "text[]", "map(varchar, double)": "map(text, double)"}
_ELSEWHERE = ("trajectories", "draws", "prompts")  # whose words serve for columns of the same name
_QUERY = re.compile(r"```sql\n(?P<query>.*?)```\n(?:\n```\n.*?```\n)?", re.S)


def main(arguments: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        empty = Run.create(folder, "empty", config={}, sampler_sql="", code_version="")
        write(SQL, reference(storage.connect(empty)))
    write(SETTINGS, references.settings())
    write(COMMANDS, references.commands())
    if arguments:
        con = storage.connect(arguments[0])
        QUERIES.write_text(answered(QUERIES.read_text(), lambda query: shown(con, query)))


def made(page: Path) -> str:
    """What of a page is made."""
    return MARK.split(page.read_text(), maxsplit=1)[1]


def write(page: Path, text: str) -> None:
    page.write_text(page.read_text().removesuffix(made(page)) + text)


# --- docs/sql.md ----------------------------------------------------------------------------------------------------


def reference(con: duckdb.DuckDBPyConnection) -> str:
    """Every view and macro with its columns, their types and their meaning."""
    told = con.execute("select name, type, meaning from help()").fetchall()
    views = [_view(con, name, meaning) for name, kind, meaning in told if kind == "view"]
    macros = [_macro(con, name, meaning) for name, kind, meaning in told if kind == "macro"]
    return "\n## Views\n\n" + "\n".join(views) + "\n## Macros\n\n" + "\n".join(macros)


def _view(con: duckdb.DuckDBPyConnection, name: str, meaning: str) -> str:
    columns = _help(con, name)
    if name.endswith("_all"):  # of the columns it shares with another view that one speaks
        columns = [it for it in columns if it not in _help(con, name.removesuffix("_all"))]
    return f"### {name}\n\n{meaning}\n\n" + _table("column", [(it, _type(kind), said) for it, kind, said in columns])


def _macro(con: duckdb.DuckDBPyConnection, signature: str, meaning: str) -> str:
    name = signature.partition("(")[0]
    told = _help(con, name)
    parameters = [(it, "", said) for it, kind, said in told if kind == "parameter"]
    said = {it: said for view in reversed(_ELSEWHERE) for it, _, said in _help(con, view)}
    said |= {it: own for it, kind, own in told if kind == "column"}
    described = con.execute(f"describe from {name}({EXAMPLE.get(name, '')})").fetchall()
    columns = [(it[0], _type(it[1].lower()), said[it[0]]) for it in described]
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


# --- docs/queries.md ------------------------------------------------------------------------------------------------


def queries(page: str) -> list[str]:
    return [found["query"] for found in _QUERY.finditer(page)]


def answered(page: str, answer: Callable[[str], str]) -> str:
    """The page with each query's answer below it."""
    return _QUERY.sub(lambda found: f"```sql\n{found['query']}```\n\n```\n{answer(found['query'])}```\n", page)


def shown(con: duckdb.DuckDBPyConnection, query: str) -> str:
    """The answer as `tba sql` prints it."""
    with redirect_stdout(io.StringIO()) as said:
        con.sql(query).show(max_rows=40, max_width=118)
    return "\n".join(line.rstrip() for line in said.getvalue().strip("\n").splitlines()) + "\n"


if __name__ == "__main__":
    main(sys.argv[1:])
