"""A supervisor whose trainer is started by something else: here, by the test."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from flows.supervision.interfaces import StopRequest
from flows.supervision.processes import Role
from storage.runs.control import read_state
from storage.runs.leases import read_lease
from storage.runs.run import Run
from tba.errors import RunFailed, Stopped
from tests.support.flows.roles import at_work, behave, finish, script
from tests.support.flows.supervised import Supervised, make_run
from tests.support.waiting import until

OTHERS = ("evaluator", "searcher-000", "searcher-001")


def started(run: Run) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(script(Role("trainer"), run.url), stdout=subprocess.DEVNULL, start_new_session=True)


def test_each_life_is_waited_for_and_adopted_and_none_is_started(run: Run):
    supervised = Supervised(run, external_trainer=True)
    at_work(run, *OTHERS)
    (waiting,) = until(lambda: supervised.said("role-waiting", "trainer"))
    assert waiting.message == "trainer cannot start yet: something else has to start it (--external-trainer)"
    first = started(run)
    until(lambda: supervised.said("role-adopted", "trainer"), "the first life is adopted")
    first.kill()
    first.wait()
    (ended,) = until(lambda: supervised.said("role-ended", "trainer"))
    assert ended.message == "trainer, which was adopted, is gone"
    until(lambda: len(supervised.said("role-waiting", "trainer")) == 2, "the second life is waited for")
    second = started(run)
    until(lambda: len(supervised.said("role-adopted", "trainer")) == 2, "the second life is adopted")
    finish(run)
    assert supervised.ended() is None
    assert second.wait(20) == 0
    assert {e.data["of"] for e in supervised.said("role-started")} == set(OTHERS)
    assert not supervised.said("role-restarting")
    lease = read_lease(run, "trainer")
    assert lease and lease.life == 2


@pytest.mark.long
def test_a_trainer_that_fails_again_and_again_leaves_the_run_waiting_for_the_next(run: Run):
    """`limits.max_restarts` is 2, and counts only what the supervisor starts."""
    supervised = Supervised(run, external_trainer=True)
    behave(run, "trainer", "turn")
    for life in (1, 2, 3, 4):
        assert started(run).wait(20) == 1
        until(lambda life=life: (it := read_lease(run, "trainer")) and it.life == life)
        until(lambda life=life: supervised.seen["trainer"].lease.life == life, "the supervisor has seen it")
    behave(run, "trainer", "finish")
    finish(run)
    assert started(run).wait(20) == 0
    assert supervised.ended() is None


def test_a_stop_reaches_it_by_the_wanted_state(run: Run):
    supervised = Supervised(run, external_trainer=True)
    trainer = started(run)
    until(lambda: supervised.said("role-adopted", "trainer"))
    supervised.request = StopRequest("enough")
    assert isinstance(supervised.ended(), Stopped)
    assert trainer.wait(20) == 4
    assert not supervised.said("role-left")


def test_one_that_does_not_come_fails_the_run(tmp_path: Path):
    run = make_run(tmp_path, {"limits.data_deadline": 2.0})
    error = Supervised(run, external_trainer=True).ended()
    assert isinstance(error, RunFailed)
    assert "trainer could not be started for" in str(error) and "something else has to start it" in str(error)
    assert read_state(run).desired == "stop"


@pytest.mark.long
def test_one_that_hangs_is_reported(run: Run):
    supervised = Supervised(run, external_trainer=True)
    trainer = started(run)
    until(lambda: supervised.said("role-adopted", "trainer"))
    os.kill(trainer.pid, signal.SIGSTOP)
    (silent,) = until(lambda: supervised.said("role-silent", "trainer"))
    assert "has not renewed its lease" in silent.message
    trainer.kill()
    trainer.wait()
    finish(run)
    assert started(run).wait(20) == 0
    assert supervised.ended() is None
