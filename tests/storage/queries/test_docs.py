"""The pages describe every view and macro, every column with its type, and every folder."""

import re
from pathlib import Path

import duckdb
import pytest

import storage
from docs import build
from storage import layout
from tests.support.storage.synthetic import make_run
from tests.support.storage.views import MACROS, VIEWS


@pytest.fixture(scope="module")
def con(tmp_path_factory: pytest.TempPathFactory) -> duckdb.DuckDBPyConnection:
    return storage.connect(make_run(str(tmp_path_factory.mktemp("root"))))


def described(con: duckdb.DuckDBPyConnection, source: str) -> list[str]:
    return [row[0] for row in con.execute(f"describe from {source}").fetchall()]


def told(con: duckdb.DuckDBPyConnection, name: str, kind: str) -> list[str]:
    query = "select name from help(?) where if(? = 'view', type not in ('view', 'macro'), type = ?)"
    return [row[0] for row in con.execute(query, [name, kind, kind]).fetchall()]


def test_the_page_says_of_every_view_and_macro_what_the_database_says(con: duckdb.DuckDBPyConnection):
    assert build.made(build.SQL) == build.reference(con)


@pytest.mark.parametrize("view", VIEWS)
def test_every_column_of_a_view_has_a_meaning(view: str, con: duckdb.DuckDBPyConnection):
    assert told(con, view, "view") == described(con, view)
    assert con.execute("select count(*) from help(?) where coalesce(meaning, '') = ''", [view]).fetchone() == (0,)


@pytest.mark.parametrize("macro", MACROS)
def test_what_is_said_of_a_macro_fits_it(macro: str, con: duckdb.DuckDBPyConnection):
    """The description of a macro names all of its parameters, and no column that does not exist."""
    name = macro.partition("(")[0]
    query = "select parameters from duckdb_functions() where function_name = ? and function_type = 'table_macro'"
    parameters = con.execute(query, [name]).fetchone()
    assert parameters == (told(con, name, "parameter"),)
    columns = described(con, macro)
    assert [column for column in told(con, name, "column") if column not in columns] == []


QUERIES = build.QUERIES.read_text()


@pytest.mark.parametrize("query", build.queries(QUERIES))
def test_every_query_of_the_page_works_and_has_the_columns_that_are_shown(query: str, con: duckdb.DuckDBPyConnection):
    answer = QUERIES.split(f"```sql\n{query}```\n\n```\n")[1].split("```")[0]
    shown = [name.strip() for name in answer.splitlines()[1].strip("│").split("│")]
    columns = con.sql(query).columns
    assert shown == columns
    assert "…" not in answer
    con.sql(query).fetchall()


def test_there_are_twenty_questions_each_with_a_query():
    numbers = re.findall(r"^\*\*(\d+)\. ", QUERIES, flags=re.M)
    assert numbers == [str(n) for n in range(1, 21)]
    assert len(build.queries(QUERIES)) == len(numbers)


def test_answers_are_written_below_their_queries_once(con: duckdb.DuckDBPyConnection):
    page = "One\n\n```sql\nselect 1 as a\n```\n\nTwo\n\n```sql\nselect 2 as b\n```\n\nand so on\n"
    once = build.answered(page, lambda query: build.shown(con, query))
    assert once.index("select 1") < once.index("│     1 │") < once.index("Two") < once.index("│     2 │")
    assert build.answered(once, lambda query: build.shown(con, query)) == once


def test_the_page_of_the_format_lists_every_folder():
    listing = Path(build.HERE / "storage.md").read_text().split("```")[1]
    for constant, name in vars(layout).items():
        if constant.isupper() and not constant.startswith("_") and isinstance(name, str):
            assert name in listing
