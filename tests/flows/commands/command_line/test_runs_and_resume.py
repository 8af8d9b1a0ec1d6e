"""`tba runs`, which lists the state of every run, and what `tba resume` refuses."""

import json
import os
from pathlib import Path

import pytest

from flows.planning import run_summary
from storage import layout
from storage.runs.control import change_state
from storage.runs.held_lease import HeldLease
from storage.runs.leases import SUPERVISOR, read_leases
from storage.runs.run import Run
from storage.weights.checkpoints import Checkpoints
from tba.presets import preset
from tests.support.flows.command_line import printed, refused
from tests.support.storage.synthetic import STEPS, copy_run


def test_runs_lists_the_newest_first(capsys: pytest.CaptureFixture[str], root: str):
    expected = [
        {
            "run": "live", "task": "quickstart", "parent": "", "state": "interrupted", "step": 4, "version": 2,
            "score": 0.25, "searchers": 0,
        },
        {
            "run": "first", "task": "quickstart", "parent": "", "state": "finished", "step": STEPS, "version": 4,
            "score": 0.75, "searchers": 0,
        },
    ]  # fmt: skip
    assert json.loads(printed(capsys, "runs", root, "--json")) == expected
    assert json.loads(printed(capsys, "runs", "--json")) == expected
    table = printed(capsys, "runs").splitlines()
    assert [line.split() for line in table if "first" in line] == [
        ["first", "quickstart", "finished", "8", "4", "0.750"]
    ]


def test_runs_shows_living_searchers_and_the_wanted_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], root: str
):
    run = copy_run(Run.open(f"{root}/runs/live"), tmp_path / "runs")
    with HeldLease(run, "searcher-000", every=60), HeldLease(run, "trainer", every=60) as trainer:
        trainer.tell("step 5 of 8", step=5)
        trainer.renew()
        (told,) = json.loads(printed(capsys, "runs", str(tmp_path), "--json"))
        assert (told["state"], told["searchers"], told["step"]) == ("running", 1, 5)
        change_state(run, desired="stop")
        (told,) = json.loads(printed(capsys, "runs", str(tmp_path), "--json"))
        assert told["state"] == "stopping"
    (told,) = json.loads(printed(capsys, "runs", str(tmp_path), "--json"))
    assert (told["state"], told["searchers"]) == ("stopped", 0)


def test_a_run_that_has_failed_says_so_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str], root: str):
    run = copy_run(Run.open(f"{root}/runs/live"), tmp_path / "runs")
    change_state(run, desired="stop", why="failed: trainer ended 6 times within 600 s")
    (told,) = json.loads(printed(capsys, "runs", str(tmp_path), "--json"))
    assert told["state"] == "failed"
    assert "trainer ended 6 times" in printed(capsys, "watch", run.url, "--once")


def test_runs_never_shortens_the_name_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    name = "quickstart-20261121-180631-with-more"
    Run.create(str(tmp_path), name, config=preset("quickstart").to_dict(), sampler_sql="", code_version="")
    monkeypatch.setenv("COLUMNS", "60")
    assert name in printed(capsys, "runs", str(tmp_path))


def test_a_run_with_a_living_supervisor_is_not_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str], root: str):
    run = copy_run(Run.open(f"{root}/runs/live"), tmp_path / "runs")
    with HeldLease(run, SUPERVISOR, every=0.2) as held:
        assert f"already has a supervisor, pid {os.getpid()}" in refused(capsys, "resume", run.url)
        held.check()


def test_a_run_is_not_resumed_with_other_settings_and_the_error_names_the_command_that_can(
    capsys: pytest.CaptureFixture[str],
):
    said = refused(capsys, "resume", "first", "--set", "training.ranks=2")
    assert "--set: a run keeps its settings; `tba fork first --step N --set …` goes on from a step with others" in said


def test_a_finished_run_is_not_started_again(capsys: pytest.CaptureFixture[str], root: str):
    said, run = printed(capsys, "resume", "first"), Run.open(f"{root}/runs/first")
    assert (
        f"first has finished already; `tba fork {run.url} --step {STEPS} --set training.steps=…` goes further" in said
    )
    assert "\nversion 4, step 8: greedy 0.75" in said
    assert read_leases(run) == []


def test_a_run_that_lacks_its_last_checkpoint_has_not_finished(tmp_path: Path, root: str):
    run = copy_run(Run.open(f"{root}/runs/first"), tmp_path / "runs")
    assert run_summary.has_all(run)
    newest = Checkpoints(run).newest()
    assert newest
    run.store.delete(layout.checkpoint(newest) + layout.MANIFEST)
    assert not run_summary.has_all(run)


def test_runs_lists_a_run_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    Run.create(
        str(tmp_path), "odd", config={"task": {"name": "other"}, "seed": "blue"}, sampler_sql="", code_version=""
    )
    (told,) = json.loads(printed(capsys, "runs", str(tmp_path), "--json"))
    assert (told["run"], told["task"], told["state"], told["step"]) == ("odd", "other", "unreadable", None)


def test_runs_lists_a_run_whose_record_is_damaged_after_the_others_and_no_other_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], root: str
):
    copy_run(Run.open(f"{root}/runs/first"), tmp_path / "runs")
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "runs" / "torn").mkdir()
    (tmp_path / "runs" / "torn" / "run.json").write_text('{"run": "torn", ')
    told = json.loads(printed(capsys, "runs", str(tmp_path), "--json"))
    assert [(run["run"], run["state"]) for run in told] == [("first", "finished"), ("torn", "unreadable")]


def test_runs_of_an_empty_root_says_how_to_begin(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert "tba run quickstart" in printed(capsys, "runs", str(tmp_path))
    assert printed(capsys, "runs", str(tmp_path), "--json") == "[]\n"
    (tmp_path / "runs").mkdir()
    assert f"`tba runs {tmp_path}`" in printed(capsys, "runs", f"{tmp_path}/runs/")
