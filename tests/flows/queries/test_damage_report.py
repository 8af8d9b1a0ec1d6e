"""Damage to one object ends no command. Each command warns of what it leaves out, and a report marks it."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from flows.cli import main
from flows.pages.markdown import last_scores, markdown
from flows.queries import query_process
from storage import layout
from storage.local_files import remembered_reads
from storage.queries import difficulty
from storage.runs.run import Run
from tba.types import Version
from tests.support.faults.object_damage import DAMAGES, HOLDING, MAY_BE_GONE, flip
from tests.support.faults.rewriting import with_digest
from tests.support.sampled_parameters import sampled
from tests.support.storage.stored_objects import path_of
from tests.support.storage.synthetic import PROMPTS, STEPS, copy_run, make_run, prune_version

pytestmark = pytest.mark.usefixtures("short_pauses")
READ_BY_RUNS = (layout.attempt(2), layout.evaluation(Version(2, 1)))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = make_run(str(tmp_path_factory.mktemp("root")))
    for version in (Version(1, 1), Version(3, 1)):
        prune_version(run, version)
    return run


@pytest.fixture
def whole(finished: Run, tmp_path: Path) -> Run:
    """Return a copy that a test may change, in a root where `tba runs` finds it."""
    (tmp_path / "runs").mkdir()
    return copy_run(finished, tmp_path / "runs")


HOW = ("cut", "a list", "removed")


NOTICED = [(key, how) for key in HOLDING for how in HOW if not (how == "removed" and key in MAY_BE_GONE)]


@pytest.mark.parametrize(("key", "how"), sampled(NOTICED, kept=NOTICED[::5]))
def test_no_command_fails_because_of_damage_and_each_names_it(
    whole: Run, key: str, how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    DAMAGES[how](path_of(whole, key), None)
    warning = f"warning: 1 object of the run first is damaged or missing and is left out: {key} ("

    assert main(["sql", whole.url, "select count(*) as n, sum(reward) from trajectories", "--json"]) == 0
    told = capsys.readouterr()
    assert len(json.loads(told.out)) == 1
    assert told.err.startswith(warning) and f"tba check {whole.url} names them all" in told.err
    assert told.err.count("\n") == 1

    assert main(["report", whole.url, "--output", str(tmp_path / "report.html")]) == 0
    assert capsys.readouterr().err.startswith(warning)
    page = (tmp_path / "report.html").read_text()
    assert "1 object is damaged or missing; figures leave them out." in page and key in page

    assert main(["watch", whole.url, "--once"]) == 0
    told = capsys.readouterr()
    assert told.err.startswith(warning) and f"! damaged or missing: {key}" in told.out.replace("\n", " ")

    assert main(["runs", str(tmp_path), "--json"]) == 0
    told = capsys.readouterr()
    [summary] = json.loads(told.out)
    assert summary["state"] in ("finished", "interrupted", "stopped") and summary["version"] == STEPS // 2
    assert told.err.startswith(warning) if key in READ_BY_RUNS else True


def test_trajectories_whose_version_no_record_describes_are_shown_without_an_age(whole: Run, tmp_path: Path):
    path_of(whole, layout.sync(1)).unlink()
    assert main(["report", whole.url, "--output", str(tmp_path / "report.html")]) == 0
    assert "entered at sync" in (tmp_path / "report.html").read_text()


def test_many_objects_are_counted_and_a_few_named(whole: Run, capsys: pytest.CaptureFixture[str]):
    for seq in range(5):
        path_of(whole, layout.shard(0, seq)).unlink()
    assert main(["sql", whole.url, "select 1 as one", "--csv"]) == 0
    told = capsys.readouterr()
    assert told.out == "one\n1\n"
    assert told.err.startswith("warning: 5 objects of the run first are damaged or missing and are left out: ")
    assert told.err.count("(is missing)") == 3 and "; … — tba check" in told.err


def test_a_run_without_damage_gets_no_warning(finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output = str(tmp_path / "report.html")
    for command in (["sql", finished.url, "from steps"], ["report", finished.url, "--output", output]):
        assert main(command) == 0
        assert capsys.readouterr().err == ""
    assert "figures leave" not in Path(output).read_text()


def test_a_comparison_marks_the_run_that_is_damaged(
    whole: Run, finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path_of(whole, layout.steps(1, 1)).write_bytes(b"")
    path_of(whole, layout.shard(0, 1)).unlink()
    output = tmp_path / "comparison.html"
    assert main(["report", whole.url, finished.url, "--output", str(output)]) == 0
    assert capsys.readouterr().err.count("warning: 2 objects") == 1
    assert f"2 objects of {whole.url} are damaged or missing" in output.read_text()


def test_a_run_whose_own_record_is_damaged_is_listed_and_named(
    whole: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(whole.url, tmp_path / "runs" / "second")
    path_of(whole, layout.RUN).write_text("{")
    assert main(["runs", str(tmp_path), "--json"]) == 0
    told = capsys.readouterr()
    assert len(json.loads(told.out)) == 2
    assert told.err.startswith("warning: run first cannot be read: ") and "run.json is not JSON" in told.err


def test_damage_inside_an_object_that_nobody_has_read_is_named_when_a_query_meets_it(
    whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(remembered_reads, "MOST_BYTES", 0)
    worker = (
        "from flows.queries import query_worker; from storage.local_files import remembered_reads; "
        "remembered_reads.MOST_BYTES = 0; query_worker.main()"
    )
    monkeypatch.setattr(query_process, "COMMAND", [sys.executable, "-c", worker])
    flip(path_of(whole, layout.shard(0, 0)), 41)  # a byte in a page of rows
    assert main(["sql", whole.url, "from trajectories", "--json"]) == 1
    told = capsys.readouterr()
    assert told.out == "" and layout.shard(0, 0) in told.err and told.err.startswith("error: ")

    output = tmp_path / "report.html"
    assert main(["report", whole.url, "--output", str(output)]) == 0
    assert layout.shard(0, 0) in output.read_text()
    assert layout.shard(0, 0) in capsys.readouterr().err


def test_the_content_of_an_object_cannot_control_the_terminal(whole: Run, capsys: pytest.CaptureFixture[str]):
    record = json.loads(whole.store.read(layout.attempt(2)))
    path_of(whole, layout.attempt(2)).write_bytes(with_digest({**record, "attempt": "\x1b[2J\nwarning: all is well"}))
    assert main(["sql", whole.url, "select 1"]) == 0
    told = capsys.readouterr().err
    assert "\x1b" not in told and told.count("\n") == 1


@pytest.mark.parametrize("key", [layout.evaluation(Version(2, 1)), layout.version(Version(2, 1)) + layout.MANIFEST])
def test_the_results_of_a_run_are_shown_without_its_damaged_objects(whole: Run, key: str):
    path_of(whole, key).write_text("[]")
    page = markdown(whole)
    assert f"1 object of the run first is damaged or missing and is left out: {key}" in page
    assert "| 000004-a0002 | 8 |" in page
    assert last_scores(whole).startswith("version 4, step 8: greedy 0.75")


def test_prompts_are_chosen_by_the_readable_objects_and_the_others_are_named(
    whole: Run, caplog: pytest.LogCaptureFixture
):
    path_of(whole, layout.shard(0, 1)).unlink()
    known = difficulty.ask(whole.url, "tries >= 0", needed=1)
    assert len(known.chosen) == len(PROMPTS)
    assert f"{layout.shard(0, 1)} is missing and is left out" in caplog.text
