"""Queries have their own process. None blocks or ends its caller, takes much memory, or sees other readers' queries."""

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from flows.pages.browse.run_snapshot import RunSnapshot
from flows.queries.query_process import QueryProcess
from flows.queries.row_values import Bounds, Encoder, decode_row, encode_row
from storage.runs.run import Run
from tba.errors import QueryEnded, QueryError, QueryFailed, Refused, TooLong
from tests.support.flows.site import Site, serve
from tests.support.storage.synthetic import STEPS, make_run

DEAF = "select levenshtein(repeat('a', 400000), repeat('b', 400000))"
"""One value that takes minutes. DuckDB looks for an interrupt only between two values."""

CRASH = "from system.pandas_scan(null)"
TALL = "select repeat('a', 300000000) as tall"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(str(tmp_path_factory.mktemp("root")))


@pytest.fixture
def snapshot(finished: Run) -> Iterator[RunSnapshot]:
    with closing(RunSnapshot(finished, 20.0)) as snapshot:
        yield snapshot


@pytest.fixture(scope="module")
def site(finished: Run) -> Iterator[Site]:
    with serve(finished) as site:
        yield site


def asked(site: Site, query: str) -> str:
    status, _, body = site.ask(f"/sql?{urlencode({'query': query})}")
    assert status == 200
    return body


def test_a_query_that_heeds_no_interrupt_is_ended_with_its_process(finished: Run):
    with closing(QueryProcess(finished.url)) as queries:
        with pytest.raises(TooLong, match="longer than"):
            queries.ask("answer", query=DEAF, most=1, skip=0, seconds=0.5)
        assert not queries.is_running
        assert queries.ask("rows", query="select count(*) from steps", parameters=[])[1] == [[STEPS]]


def test_a_query_that_can_be_interrupted_leaves_the_process_and_earlier_tables(finished: Run):
    slow = "select sum(a.i * b.i) from range(10000000) a(i), range(10000000) b(i)"
    with closing(QueryProcess(finished.url)) as queries:
        queries.ask("rows", query="create temp table kept as select 7 as seven", parameters=[])
        with pytest.raises(TooLong):
            queries.ask("rows", query=slow, parameters=[], seconds=0.5)
        assert queries.ask("rows", query="from kept", parameters=[])[1] == [[7]]


def test_pages_say_that_a_query_ended_its_process_and_go_on(site: Site):
    assert "the query ended the process that answers queries" in asked(site, CRASH)
    assert f"<td class='n'>{STEPS}</td>" in asked(site, "select count(*) from steps")


def test_a_process_that_was_closed_answers_nothing(finished: Run):
    queries = QueryProcess(finished.url)
    queries.start()
    queries.close()
    with pytest.raises(QueryEnded):
        queries.ask("rows", query="select 1", parameters=[])
    assert not queries.is_running


# --- limits -----------------------------------------------------------------------------------------------------------


def test_a_page_shows_the_beginning_of_a_value_of_hundreds_of_millions_of_characters(site: Site):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    body = asked(site, TALL)
    assert "aaaaaaaa…" in body
    assert len(body) < 50_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kilobytes


@pytest.mark.parametrize(
    "query",
    [
        "select " + ", ".join(["list_transform(range(1000), lambda x: repeat('a', 9000))"] * 3),
        f"with t as (select {', '.join(['i'] * 50)} from range(300) t(i)) select {', '.join('*' * 60)} from t",
    ],
)
def test_an_answer_that_is_too_long_for_a_page_is_refused(site: Site, query: str):
    assert "the answer is longer than 8 million characters" in asked(site, query)


def test_a_list_that_needs_more_memory_than_there_is_ends_neither_pages_nor_machine(site: Site):
    assert "role='alert'" in asked(site, "select range(100000000000)")
    assert "42" in asked(site, "select 6 * 7")


# --- separate readers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "looks_for"),
    [
        ("from enable_logging()", "select message from duckdb_logs"),
        ("from enable_profiling()", "select coalesce(current_setting('enable_profiling'), '') from range(1)"),
    ],
)
def test_no_query_sees_what_another_reader_asked_or_left(snapshot: RunSnapshot, left: str, looks_for: str):
    unspoilt = snapshot.answer(looks_for, most=100)
    snapshot.answer(left, most=1)
    snapshot.answer("select 'a secret'", most=1)
    assert snapshot.answer(looks_for, most=100) == unspoilt
    assert snapshot.ask(looks_for) == unspoilt


@pytest.mark.parametrize(
    "statement",
    ["create temp table t as select 1", "set variable mine = 1", "prepare p as select 1", "call enable_logging()",
     "attach ':memory:' as other", "begin", "drop view steps", "pragma enable_profiling"],
)  # fmt: skip
def test_a_reader_can_only_read(snapshot: RunSnapshot, statement: str):
    with pytest.raises(QueryError) as refused:
        snapshot.answer(statement, most=1)
    assert isinstance(refused.value, Refused | QueryFailed)


# --- values -----------------------------------------------------------------------------------------------------------


def crossed(*values: Any) -> tuple[Any, ...]:
    return decode_row(json.loads(json.dumps(encode_row(values))))


@pytest.mark.parametrize(
    "value",
    [None, True, 7, 2**100, 0.1, float("inf"), "é\ud800\0", [1, [None]], (1, "a"), {"a": [1.5]}, {1: {"b": None}},
     datetime(2026, 1, 2, 3, 4, 5, 6), datetime(2026, 1, 2, tzinfo=UTC), Decimal("1.50")],
)  # fmt: skip
def test_a_value_arrives_unchanged(value: Any):
    [arrived] = crossed(value)
    assert arrived == value
    assert type(arrived) is type(value)


def test_a_value_that_json_does_not_have_arrives_as_it_is_shown():
    day = date(2026, 1, 2)
    assert (str(crossed(day)[0]), str(crossed([day])[0])) == (str(day), str([day]))
    assert str(crossed(10**6000)[0]).startswith("an integer of 19,932 bits")


def test_a_text_or_list_that_is_too_long_arrives_cut():
    assert Encoder(Bounds(text=3, items=2, whole=1000)).row(["abcd", [1, 2, 3]]) == ["abc", [1, 2]]
    with pytest.raises(Refused):
        Encoder(Bounds(text=1000, items=2, whole=100)).row(["a" * 101])


# --- tba sql ----------------------------------------------------------------------------------------------------------


def test_every_form_of_output_except_the_table_has_whole_values(finished: Run, tmp_path: Path):
    import pyarrow.parquet as pq

    tall, path = "é" * 3_000_000, tmp_path / "tall.parquet"
    query = "select repeat('é', 3000000) as tall"

    def written(queries: QueryProcess, form: str) -> str:
        parts: list[str] = []
        place = str(path) if form == "parquet" else None
        queries.ask("write", query=query, form=form, width=80, path=place, must_have_rows=True, write=parts.append)
        assert max(map(len, parts), default=0) < 1_000_000
        return "".join(parts)

    with closing(QueryProcess(finished.url)) as queries:
        assert written(queries, "csv") == f"tall\n{tall}\n"
        assert json.loads(written(queries, "json")) == [{"tall": tall}]
        assert len(written(queries, "table")) < 100_000
        written(queries, "parquet")
    assert pq.read_table(path).column("tall").to_pylist() == [tall]


def test_an_answer_is_written_while_it_is_computed(finished: Run):
    """Neither the command nor the process of its query ever has even half of the answer in memory."""
    script = """
import re, resource, sys
from flows.cli import main
assert main(sys.argv[1:]) == 0
own = re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]
print(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)
"""
    query = "select repeat('a', 1000) as a from range(600000)"
    command = [sys.executable, "-c", script, "sql", finished.url, "--csv", query]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout and process.stderr
    with process.stdout as out, process.stderr as said:
        assert sum(map(len, iter(lambda: out.read(1 << 20), b""))) == 600_000 * 1001 + 2
        kilobytes = list(map(int, said.read().split()))
    assert process.wait() == 0
    assert max(kilobytes) < 300_000
