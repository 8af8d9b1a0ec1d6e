"""A supervisor over real processes: how roles start, finish and stop, and how the next supervisor adopts them."""

import os
import signal
from pathlib import Path

import pytest

from flows.supervision.gpus import Devices
from flows.supervision.interfaces import StopRequest
from flows.supervision.processes import LocalLauncher, Role, process_of
from storage.runs.control import change_state, read_state
from storage.runs.events import read_events
from storage.runs.leases import Lease, read_leases
from storage.runs.run import Run
from tba.errors import Stopped, Superseded
from tests.support.flows.roles import at_work, behave, finish, is_running, script, works
from tests.support.flows.supervised import ROLES, Supervised, make_run
from tests.support.waiting import until


@pytest.mark.parametrize("name", ["supervisor", "searcher-abc", "searcher--1", "searcher-²", "somebody-001"])
def test_a_lease_of_another_name_belongs_to_no_role(run: Run, name: str):
    assert Role.parse(name) is None
    assert Role.parse(Role("searcher", 12).name) == Role("searcher", 12)


def test_a_run_finishes_when_trainer_and_evaluator_have_and_no_searcher_goes_on(run: Run):
    supervised = Supervised(run)
    leases = at_work(run, *ROLES)
    finish(run)
    assert supervised.ended() is None
    state = read_state(run)
    assert (state.desired, state.why) == ("stop", "finished")
    assert not any(is_running(lease.pid) for lease in leases.values())
    assert {lease.role: lease.status for lease in read_leases(run)} == {
        "evaluator": "finished",
        "searcher-000": "stopped",
        "searcher-001": "stopped",
        "supervisor": "finished",
        "trainer": "finished",
    }
    assert "trainer begins" in (Path(run.url) / "logs/trainer-0001.log").read_text()
    kinds = [event["kind"] for event in read_events(run) if event["role"] == "supervisor"]
    assert kinds.count("role-started") == 4
    assert kinds.count("role-ended") == 4


@pytest.mark.parametrize("adopted", [False, True])
def test_once_the_trainer_has_finished_searchers_stop_and_the_evaluator_alone_is_waited_for(run: Run, adopted: bool):
    supervised = Supervised(run)
    leases = at_work(run, *ROLES)
    if adopted:
        supervised, first = Supervised(run), supervised
        assert isinstance(first.ended(), Superseded)
        until(lambda: len(supervised.said("role-adopted")) == 4, "all are adopted")
    behave(run, "trainer", "finish")
    for searcher in ("searcher-000", "searcher-001"):
        until(lambda searcher=searcher: supervised.said("role-ended", searcher))
    gone = [leases[role].pid for role in ("trainer", "searcher-000", "searcher-001")]
    until(lambda: not any(is_running(pid) for pid in gone), "their processes end")  # adopted ones end after their lease
    assert until(lambda: works(run, "evaluator")).life == 1
    assert read_state(run).desired == "run"
    for searcher in ("searcher-000", "searcher-001"):
        assert [e.message for e in supervised.said("role-draining", searcher)] == [
            f"{searcher} is asked to stop: the trainer has finished"
        ]
        assert not supervised.said("role-restarting", searcher)
    change_state(run, searchers=2)
    until(lambda: read_state(run).searchers == 0, "nobody wants searchers any more")
    finish(run)
    assert supervised.ended() is None
    assert [lease.life for lease in read_leases(run) if lease.role.startswith("searcher")] == [1, 1]
    assert {lease.status for lease in read_leases(run) if lease.role.startswith("searcher")} == {"stopped"}


def test_a_run_whose_trainer_has_finished_is_resumed_without_searchers(run: Run):
    supervised = Supervised(run)
    at_work(run, *ROLES)
    behave(run, "trainer", "finish")
    until(lambda: supervised.said("role-ended", "trainer"))
    supervised.request = StopRequest("enough")
    assert isinstance(supervised.ended(), Stopped)
    change_state(run, desired="run", searchers=2)
    again = Supervised(run)
    until(lambda: works(run, "evaluator", life=2))
    finish(run)
    assert again.ended() is None
    assert {e.data["of"] for e in again.said("role-started")} == {"evaluator"}


def test_a_searcher_too_many_that_ignores_requests_is_killed(tmp_path: Path):
    run = make_run(tmp_path, {"limits.stop_grace": 0.5})
    behave(run, "searcher-001", "stubborn")
    launcher = LocalLauncher(run, command=script, devices=Devices(run.url, uuids=[]))
    launcher.end_grace = 0.5
    supervised = Supervised(run, launcher=launcher)
    at_work(run, *ROLES)
    behave(run, "trainer", "finish")
    (ended,) = until(lambda: supervised.said("role-ended", "searcher-001"))
    assert "SIGKILL" in ended.message
    finish(run)
    assert supervised.ended() is None


def test_every_role_leads_a_session_of_its_own(run: Run):
    supervised = Supervised(run)
    leases = at_work(run, *ROLES)
    assert all(os.getsid(lease.pid) == os.getpgid(lease.pid) == lease.pid for lease in leases.values())
    finish(run)
    assert supervised.ended() is None


def test_asking_a_run_to_stop_through_its_state_stops_every_role_and_leaves_it_resumable(run: Run):
    supervised = Supervised(run)
    leases = at_work(run, *ROLES)
    change_state(run, desired="stop", why="enough")
    error = supervised.ended()
    assert isinstance(error, Stopped)
    assert "enough" in str(error)
    assert not any(is_running(lease.pid) for lease in leases.values())
    change_state(run, desired="run")
    supervised = Supervised(run)
    until(lambda: works(run, "trainer", life=2))
    finish(run)
    assert supervised.ended() is None


def test_a_role_that_hears_nothing_is_killed_within_the_time_there_is(run: Run):
    behave(run, "searcher-000", "stubborn")
    supervised = Supervised(run)
    leases = at_work(run, *ROLES)
    supervised.request = StopRequest("cancelled", within=5.0)
    assert isinstance(supervised.ended(), Stopped)
    assert not any(is_running(lease.pid) for lease in leases.values())
    assert [e.message.rsplit(" ")[-1] for e in supervised.said("role-stopping", "searcher-000")] == [
        "SIGTERM",
        "SIGKILL",
    ]
    assert read_state(run).desired == "stop"


def test_the_next_supervisor_adopts_the_roles_and_the_first_one_touches_nothing(run: Run):
    first = Supervised(run)
    leases = at_work(run, *ROLES)
    second = Supervised(run)
    assert isinstance(first.ended(), Superseded)
    until(lambda: len(second.said("role-adopted")) == 4, "all are adopted")
    assert {role: lease.pid for role, lease in at_work(run, *ROLES).items()} == {r: it.pid for r, it in leases.items()}
    os.kill(leases["searcher-000"].pid, signal.SIGKILL)
    until(lambda: works(run, "searcher-000", life=2))
    finish(run)
    assert second.ended() is None
    assert not second.said("role-started", "trainer")


def test_a_supervisor_that_finds_a_finished_trainer_does_not_start_another(run: Run):
    supervised = Supervised(run)
    at_work(run, *ROLES)
    finish(run)
    assert supervised.ended() is None
    change_state(run, desired="run")
    again = Supervised(run)
    assert again.ended() is None
    assert not again.said("role-started")


def test_searchers_come_and_go_with_the_wanted_number(run: Run):
    supervised = Supervised(run)
    leases = at_work(run, *ROLES)
    change_state(run, searchers=1)
    until(lambda: not is_running(leases["searcher-001"].pid), "the second leaves")
    change_state(run, searchers=3)
    until(lambda: works(run, "searcher-001", life=2) and works(run, "searcher-002"), "two more come")
    assert until(lambda: works(run, "searcher-000")).life == 1
    finish(run)
    assert supervised.ended() is None


def test_a_process_that_only_has_the_pid_of_a_lease_is_not_taken_for_the_role(run: Run):
    supervised = Supervised(run)
    lease = at_work(run, *ROLES)["trainer"]
    assert process_of(lease, Role("trainer"), run.name) == lease.pid
    assert process_of(lease, Role("trainer"), "another-run") is None
    assert process_of(lease, Role("searcher"), run.name) is None
    elsewhere = Lease(**{**vars(lease), "host": "elsewhere"})
    assert process_of(elsewhere, Role("trainer"), run.name) is None
    long_ago = Lease(**{**vars(lease), "renewed_at": "2020-01-01T00:00:00+00:00"})
    assert process_of(long_ago, Role("trainer"), run.name) is None
    finish(run)
    assert supervised.ended() is None
