"""`tba scale` and `tba stop` with real roles, and on runs without living roles."""

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from flows.cli import main
from storage import layout
from storage.runs.control import change_state, read_state
from storage.runs.held_lease import HeldLease
from storage.runs.leases import read_leases
from storage.runs.run import Run
from tba.errors import Stopped
from tests.support.flows.roles import at_work, behave, end_roles, is_running
from tests.support.flows.supervised import ROLES, Supervised, make_run
from tests.support.storage.synthetic import make_live_run
from tests.support.storage.synthetic import make_run as make_finished_run
from tests.support.waiting import until


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = make_run(tmp_path)
    yield run
    change_state(run, desired="stop")  # so that its supervisor starts no role again
    end_roles(run)


def test_searchers_come_and_go_while_the_run_goes_on_and_all_stop_when_asked(
    run: Run, capsys: pytest.CaptureFixture[str]
):
    supervised = Supervised(run)
    leases = at_work(run, *ROLES)
    assert main(["scale", run.url, "--searchers", "4"]) == 0
    assert "4 searcher(s) wanted" in capsys.readouterr().out
    leases |= at_work(run, "searcher-002", "searcher-003")
    assert main(["scale", run.url, "--searchers", "1"]) == 0
    gone = [f"searcher-00{i}" for i in (1, 2, 3)]
    until(lambda: all(supervised.said("role-ended", role) for role in gone))
    assert not any(is_running(leases[role].pid) for role in gone)
    assert main(["scale", run.url, "--searchers", "2"]) == 0
    at_work(run, "searcher-001", life=2)
    assert all(is_running(leases[role].pid) for role in ("trainer", "evaluator", "searcher-000"))
    assert not supervised.said("role-restarting")
    capsys.readouterr()
    assert main(["stop", run.url, "--why", "enough"]) == 0
    assert f"r has stopped; `tba resume {run.url}`" in capsys.readouterr().out
    assert isinstance(supervised.ended(), Stopped)
    assert not any(is_running(lease.pid) for lease in read_leases(run) if lease.role != "supervisor")
    state = read_state(run)
    assert (state.desired, state.why, state.searchers) == ("stop", "enough", 2)
    assert main(["stop", run.url]) == 0
    assert "r is stopped: there is nothing to stop" in capsys.readouterr().out
    assert read_state(run) == state
    assert main(["scale", run.url, "--searchers", "3"]) == 0
    assert "goes on with 3 searcher(s)" in capsys.readouterr().out
    assert read_state(run).searchers == 3


def test_whoever_does_not_stop_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = make_run(tmp_path, {"limits.stop_grace": 0.2, "limits.silent_after": 1.0})
    behave(run, "trainer", "stubborn")
    supervised = Supervised(run)
    try:
        at_work(run, *ROLES)
        supervised.options["launcher"].end_grace = 60.0
        assert main(["stop", run.url]) == 1
        assert f"trainer of {run.url} still at work" in capsys.readouterr().err.replace("supervisor, ", "")
        supervised.options["launcher"].end_grace = 0.0
    finally:
        end_roles(run)
    supervised.ended()


@pytest.mark.parametrize(
    ("changes", "searchers", "said"),
    [
        ({}, "-1", "--searchers: must be between 0 and 1000, got -1"),
        ({"sync.lag": 1, "search.prompts_per_round": 64}, "3", "must stay 2 if sync.lag is set, because the trainer"),
    ],
)
def test_an_impossible_number_of_searchers_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], searchers: str, said: str
):
    run = make_run(tmp_path, changes)
    assert main(["scale", run.url, "--searchers", searchers]) == 2
    assert said in capsys.readouterr().err
    assert read_state(run).searchers == 2


def test_a_run_that_has_finished_is_neither_scaled_nor_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = make_finished_run(str(tmp_path))
    assert main(["scale", run.url, "--searchers", "2"]) == 2
    assert "is finished" in capsys.readouterr().err
    assert main(["stop", run.url]) == 0
    assert "there is nothing to stop" in capsys.readouterr().out


def test_an_interrupted_run_has_nobody_to_stop(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = make_live_run(str(tmp_path))
    change_state(run, desired="run")
    assert main(["stop", run.url]) == 0
    assert "is interrupted: there is nothing to stop" in capsys.readouterr().out
    assert read_state(run).desired == "run"


def test_a_damaged_lease_or_state_hides_no_role_and_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = make_live_run(str(tmp_path))
    change_state(run, desired="run", searchers=1)
    with HeldLease(run, "trainer", every=60) as trainer, HeldLease(run, "searcher-000", every=60):
        trainer.tell("step 3 of 9")
        (Path(run.url) / layout.lease("searcher-000")).write_bytes(b"{")
        assert main(["watch", run.url, "--once"]) == 0
        shown = capsys.readouterr().out.replace("\n", "")
        assert "searcher-000/lease.json" in shown and "running" in shown and "starting" in shown
        (Path(run.url) / layout.STATE).write_bytes(b"[]")
        assert main(["watch", run.url, "--once"]) == 0
        assert "control/state.json" in (shown := capsys.readouterr().out.replace("\n", "")) and "unreadable" in shown
        assert main(["check", run.url]) == 1
        told = capsys.readouterr().out
        assert layout.STATE in told and layout.lease("searcher-000") in told


def test_whoever_may_be_at_work_behind_a_damaged_lease_is_asked_to_stop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = make_run(tmp_path, {"limits.silent_after": 1.0})
    with HeldLease(run, "trainer", every=0.1) as trainer:
        (Path(run.url) / layout.lease("evaluator")).parent.mkdir()
        (Path(run.url) / layout.lease("evaluator")).write_bytes(b"{")

        def stops() -> None:
            with suppress(Stopped):
                while True:
                    trainer.check()
                    time.sleep(0.05)
            trainer.close()

        role = threading.Thread(target=stops)
        role.start()
        assert main(["stop", run.url]) == 0
        role.join()
    assert "r has stopped" in capsys.readouterr().out
    change_state(run, desired="run")
    assert main(["stop", run.url]) == 0
    assert read_state(run).desired == "stop", "though nobody but the unknown holder of a damaged lease is left"
