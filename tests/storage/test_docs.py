"""docs/storage.md describes what there is: every view with every column and its type, and every folder."""

import re
from pathlib import Path

import duckdb
import pytest

import storage
from storage import layout
from tests.storage.synthetic import make_run

PAGE = (Path(__file__).parents[2] / "docs" / "storage.md").read_text()
TYPES = {"VARCHAR": "text", "MAP(VARCHAR, DOUBLE)": "map(text, double)"}


@pytest.fixture(scope="module")
def con(tmp_path_factory: pytest.TempPathFactory) -> duckdb.DuckDBPyConnection:
    return storage.connect(make_run(str(tmp_path_factory.mktemp("root"))))


def documented() -> dict[str, dict[str, str]]:
    """Columns and their types by view: a paragraph that begins with the view's name, then a table of columns."""
    found: dict[str, dict[str, str]] = {}
    for name, table in re.findall(r"^\*\*(\w+)\*\*:.*?\n\n(\| column .*?)\n\n", PAGE, re.M | re.S):
        rows = [row.split("|")[1:3] for row in table.splitlines()[2:]]
        columns = [(column.strip(), kind.strip()) for columns, kind in rows for column in columns.split(",")]
        assert len(dict(columns)) == len(columns), f"{name}: a column twice"
        found[name] = dict(columns)
    for name in re.findall(r"\*\*(\w+)_all\*\* also has those\s+of abandoned attempts, and a column `abandoned`", PAGE):
        found[f"{name}_all"] = {**found[name], "abandoned": "boolean"}
    return found


def test_the_page_describes_every_view_and_every_column(con: duckdb.DuckDBPyConnection):
    views = [name for (name,) in con.execute("show tables").fetchall()]
    offered = {}
    for view in views:
        columns = [row[:2] for row in con.execute(f"describe {view}").fetchall()]
        offered[view] = {name: TYPES.get(kind, kind.lower()) for name, kind in columns}
    assert documented() == offered


def test_the_page_lists_every_folder():
    listing = PAGE.split("```")[1]
    for constant, name in vars(layout).items():
        if constant.isupper() and not constant.startswith("_") and isinstance(name, str):
            assert name in listing
