"""`tba sql`: its options, the forms of its answers, and its errors."""

import csv
import io
import json
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from flows.cli import main
from tests.support.flows.command_line import printed, refused
from tests.support.sampled_parameters import sampled


def test_sql_answers_as_a_table(capsys: pytest.CaptureFixture[str]):
    assert "│ count_star() │" in printed(capsys, "sql", "first", "select count(*) from steps")


def test_sql_takes_its_options_before_and_after_the_query(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    query, path = "select 7 as seven", tmp_path / "question.sql"
    path.write_text(query)
    for words in (["--csv", "first", query], ["first", "--csv", query], ["first", query, "--csv"]):
        assert printed(capsys, "sql", *words) == "seven\n7\n"
    assert printed(capsys, "sql", "-f", str(path), "first", "--csv") == "seven\n7\n"
    for words in (["-f", str(path), "first", query], ["first", query, "-f", str(path)]):
        assert "-f: there is a QUERY already" in refused(capsys, "sql", *words)


def test_sql_refuses_two_columns_of_one_name_where_one_would_be_lost(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    query = "select d.step, t.step from draws d join trajectories t using (trajectory_id)"
    for form in (["--json"], ["--parquet", str(tmp_path / "answer.parquet")]):
        assert f"{form[0]}: 'step' names more than one column" in refused(capsys, "sql", "first", query, *form)
    assert printed(capsys, "sql", "first", query, "--csv").startswith("step,step\n")


def test_sql_answers_as_rows_of_json(capsys: pytest.CaptureFixture[str]):
    query = """
        select step, loss > 0 as learns, null as nothing, 'nan'::double as undefined, [1, 2] as list,
            map {'a': 1} as parts, 1.5::decimal(4, 2) as decimal, sum(step)::hugeint as big,
            date '2026-01-02' as day, '{"a": 1}'::json as text
        from steps where step = 1 group by all
    """
    assert json.loads(printed(capsys, "sql", "first", query, "--json")) == [
        {
            "step": 1, "learns": True, "nothing": None, "undefined": None, "list": [1, 2], "parts": {"a": 1},
            "decimal": 1.5, "big": 1, "day": "2026-01-02", "text": '{"a": 1}',
        }
    ]  # fmt: skip
    assert json.loads(printed(capsys, "sql", "first", "select 1 from steps where false", "--json")) == []


@pytest.mark.parametrize(
    "view", sampled(["trajectories", "prompts", "events", "shards"], kept=["trajectories", "events"])
)
def test_sql_answers_in_every_form(view: str, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    rows = json.loads(printed(capsys, "sql", "first", f"from {view}", "--json"))
    lines = list(csv.reader(io.StringIO(printed(capsys, "sql", "first", f"from {view}", "--csv"))))
    printed(capsys, "sql", "first", f"from {view}", "--parquet", str(tmp_path / "answer.parquet"))
    assert rows
    assert lines[0] == list(rows[0])
    assert len(lines) == len(rows) + 1
    assert pq.read_metadata(tmp_path / "answer.parquet").num_rows == len(rows)


def test_sql_never_overwrites_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    target = tmp_path / "answer.parquet"
    target.write_text("mine")
    assert "exists already" in refused(capsys, "sql", "first", "select 1", "--parquet", str(target))
    assert target.read_text() == "mine"


def test_sql_takes_a_file_or_standard_input(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    query = tmp_path / "question.sql"
    query.write_text("create temp table best as select max(reward) as reward from trajectories;\nselect * from best;\n")
    assert json.loads(printed(capsys, "sql", "first", "-f", str(query), "--json")) == [{"reward": 1.0}]
    monkeypatch.setattr(sys, "stdin", io.StringIO("select 42 as answer"))
    assert json.loads(printed(capsys, "sql", "first", "--json")) == [{"answer": 42}]


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("selec 1", "syntax error"),
        ("select rewrd from trajectories", "Candidate bindings"),
        ("copy steps to 'steps.csv'", "disabled by configuration"),
        ("select * from read_text('/etc/passwd')", "disabled by configuration"),
        ("", "no query"),
    ],
)
def test_sql_refuses_in_one_line(query: str, reason: str, capsys: pytest.CaptureFixture[str]):
    assert reason in refused(capsys, "sql", "first", query)


def test_the_prompt_answers_until_it_is_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    lines = iter(["select count(*)", "from steps;", "select nonsense;", "", "show tables;", "exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert main(["sql", "first"]) == 0
    out, error = capsys.readouterr()
    assert "│            8 │" in out
    assert "trajectories" in out
    assert 'Referenced column "nonsense"' in error
