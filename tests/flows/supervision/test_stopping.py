"""How long a supervisor waits for roles that were asked to stop and say how much time they need. Some tests control the
clock; others use real processes, which end when the test lets them."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.commands.stop import stop
from flows.supervision.gpus import Devices
from flows.supervision.interfaces import Event, StopRequest
from flows.supervision.one_life import watch_one
from flows.supervision.processes import STOPPED, LocalLauncher, Role
from flows.supervision.stopping import MOST, SAFETY, Patience, Stopping, forecast, seconds_to_stop
from storage.runs.control import change_state
from storage.runs.lease_watch import Seen
from storage.runs.leases import readable_lease
from storage.runs.run import Run
from tba.config import LimitsConfig, parse
from tba.errors import Stopped
from tests.support.flows.leases_seen import Clock, seen
from tests.support.flows.roles import LIMITS, at_work, behave, end_roles, is_running, script
from tests.support.flows.supervised import ROLES, Supervised, make_run
from tests.support.waiting import until

LONG = 300.0  # seconds that a role says it needs, more than any test takes
GRACE = 2.0  # seconds in which a role stops also on a busy machine


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = make_run(tmp_path, {"limits.stop_grace": 0.3})
    yield run
    end_roles(run)


@pytest.fixture
def patient_run(tmp_path: Path) -> Iterator[Run]:
    run = make_run(tmp_path, {"limits.stop_grace": GRACE})
    yield run
    end_roles(run)


def until_it_is_known(supervised: Supervised) -> None:
    """Wait until the supervisor knows that a role needs LONG to stop."""
    until(lambda: any(seconds_to_stop(it.lease) == LONG for it in dict(supervised.seen).values()))


def patience_over(patience: Patience, clock: Clock, role: Seen | None) -> float:
    """Return after how many seconds the patience with a role is over, if the role keeps saying the same."""
    while True:
        patience.look(role)
        if patience.is_over:
            return clock.now - patience.began
        clock.now += 1


def test_a_role_says_how_long_it_needs_to_stop_or_else_how_rarely_it_reads_the_wanted_state():
    assert seconds_to_stop(seen(seconds_to_stop=40, hears_every=3.0).lease) == 40
    assert seconds_to_stop(seen(hears_every=3.0).lease) == 3
    assert seconds_to_stop(seen().lease) == 0


@pytest.mark.parametrize(("role", "over"), [
    (None, 60),
    (seen(), 60),
    (seen(seconds_to_stop=20), 60),
    (seen(seconds_to_stop=100), SAFETY * 100),
    (seen(hears_every=100), SAFETY * 100),
    (seen(seconds_to_stop=100, silent_for=16), 60),
])  # fmt: skip
def test_a_role_without_progress_has_the_grace_or_twice_the_time_that_it_says(
    clock: Clock, role: Seen | None, over: float
):
    assert patience_over(Patience(60, silent_after=15), clock, role) == over + 1


def test_a_role_with_progress_has_the_same_time_again_up_to_a_bound(clock: Clock):
    patience, began = Patience(10, silent_after=15), clock.now
    for step in range(4):
        patience.look(seen(step=step, seconds_to_stop=50))
        clock.now += 90
        assert not patience.is_over
    while not patience.is_over:
        step += 1
        patience.look(seen(step=step, seconds_to_stop=50))
        clock.now += 10
    assert clock.now - began == MOST * SAFETY * 50 + 10


def test_a_status_that_says_stopping_is_progress_and_any_other_status_is_not(clock: Clock):
    patience = Patience(10, silent_after=15)
    patience.look(seen())
    clock.now += 8
    patience.look(seen("stopping at the next sync"))
    clock.now += 8
    assert not patience.is_over
    patience.look(seen("stopping: stores the sync after step 3"))
    clock.now += 8
    assert not patience.is_over
    assert patience_over(Patience(10, silent_after=15), clock, seen()) == 11
    patience = Patience(10, silent_after=15)
    for word in range(12):
        patience.look(seen(f"turn {word}"))
        clock.now += 1
    assert patience.is_over


def test_a_limit_from_outside_counts_whatever_a_role_says_and_is_told_where_it_is_too_short(clock: Clock):
    stopping = Stopping(LimitsConfig(), 17.5)
    trainer = seen(seconds_to_stop=40)
    assert stopping.cut_short({"trainer": trainer}).startswith("trainer needs up to about 40 s to stop in order and is")
    assert not stopping.cut_short({"trainer": seen(seconds_to_stop=17)})
    assert not Stopping(LimitsConfig()).cut_short({"trainer": trainer})
    assert not stopping.is_over("trainer", trainer)
    clock.now += 17
    assert not stopping.is_over("trainer", trainer)
    clock.now += 1
    assert stopping.is_over("trainer", trainer)


def test_a_forecast_names_the_role_that_needs_longest():
    both = {"trainer": seen(seconds_to_stop=44.6), "searcher-000": seen(hears_every=12)}
    assert forecast(both) == "; trainer needs up to about 45 s"
    assert forecast({"trainer": seen()}) == forecast({}) == ""


def test_a_role_that_needs_longer_than_the_grace_and_says_so_is_not_killed(patient_run: Run):
    behave(patient_run, "trainer", f"needs {LONG}")
    supervised = Supervised(patient_run)
    leases = at_work(patient_run, *ROLES)
    until_it_is_known(supervised)
    supervised.request = StopRequest("enough")
    until(lambda: supervised.said("role-ended", "evaluator"), "the others stop")
    [told] = supervised.said("run-stopping")
    assert told.message == "stopping: enough; trainer needs up to about 300 s"
    time.sleep(2 * GRACE)  # on a slow machine the role is given longer, never less
    assert is_running(leases["trainer"].pid)
    behave(patient_run, "trainer", "work")
    assert isinstance(supervised.ended(), Stopped)
    assert supervised.said("role-ended", "trainer")[0].data["code"] == STOPPED
    assert not supervised.said("role-stopping")


@pytest.mark.parametrize("word", ["needs 0.4", "stubborn"])
def test_a_role_that_takes_longer_than_it_says_or_only_seems_to_get_further_is_killed(run: Run, word: str):
    behave(run, "trainer", word)
    launcher = LocalLauncher(run, command=script, devices=Devices(run.url, uuids=[]))
    launcher.end_grace = 0.5
    supervised = Supervised(run, launcher=launcher)
    at_work(run, *ROLES)
    supervised.request = StopRequest("enough")
    assert isinstance(supervised.ended(), Stopped)
    assert supervised.said("role-ended", "trainer")[0].data["code"] == -signal.SIGKILL


def test_a_role_that_hangs_is_killed_after_the_grace_whatever_it_has_said(tmp_path: Path):
    run = make_run(tmp_path, {"limits.stop_grace": 0.3, "limits.silent_after": 3.0})
    behave(run, "trainer", f"needs {LONG}")
    launcher = LocalLauncher(run, command=script, devices=Devices(run.url, uuids=[]))
    launcher.end_grace = 0.5
    supervised = Supervised(run, launcher=launcher)
    leases = at_work(run, *ROLES)
    supervised.request = StopRequest("enough")
    until(lambda: supervised.said("run-stopping"))
    os.kill(leases["trainer"].pid, signal.SIGSTOP)
    assert isinstance(supervised.ended(), Stopped)
    assert not is_running(leases["trainer"].pid)


def test_a_limit_that_is_shorter_than_a_role_needs_is_told_and_counts(run: Run):
    behave(run, "trainer", f"needs {LONG}")
    supervised = Supervised(run)
    at_work(run, *ROLES)
    until_it_is_known(supervised)
    supervised.request = StopRequest("cancelled", within=4.0)
    assert isinstance(supervised.ended(), Stopped)
    [told] = supervised.said("stop-cut-short")
    assert told.severity == "warning" and "trainer needs up to about 300 s to stop" in told.message
    assert supervised.said("role-ended", "trainer")[0].data["code"] == -signal.SIGKILL


def test_a_searcher_too_many_that_needs_long_is_not_killed(patient_run: Run):
    behave(patient_run, "searcher-001", f"needs {LONG}")
    supervised = Supervised(patient_run)
    leases = at_work(patient_run, *ROLES)
    until_it_is_known(supervised)
    change_state(patient_run, searchers=1)
    until(lambda: supervised.said("role-draining", "searcher-001"))
    time.sleep(2 * GRACE)
    assert is_running(leases["searcher-001"].pid)
    behave(patient_run, "searcher-001", "work")
    until(lambda: supervised.said("role-ended", "searcher-001"))
    assert supervised.said("role-ended", "searcher-001")[0].data["code"] == STOPPED
    behave(patient_run, "trainer", "finish")
    behave(patient_run, "evaluator", "finish")
    assert supervised.ended() is None


class WatchedLife(threading.Thread):
    """One life of a trainer, which is asked to stop once `request` is set."""

    def __init__(self, run: Run):
        super().__init__(daemon=True)
        self.run_ = run
        self.request: StopRequest | None = None
        self.events: list[Event] = []
        self.code: int | None = None
        self.start()

    def run(self) -> None:
        run, limits = self.run_, parse(self.run_.config).limits
        launcher = LocalLauncher(run, command=script, devices=Devices(run.url, uuids=[]))
        launcher.end_grace = 0.5
        self.code, _ = watch_one(
            run, launcher, limits, Role("trainer"), 1, should_stop=lambda: self.request, on_event=self.events.append
        )

    def ask_to_stop(self, request: StopRequest) -> None:
        """Ask the life to stop once its watcher knows how long it needs, which takes the watcher at most two looks."""
        until(lambda: (it := readable_lease(self.run_, "trainer")) and seconds_to_stop(it) == LONG)
        time.sleep(3 * LIMITS["limits.lease_every"])
        self.request = request
        until(lambda: any(event.kind == "role-stopping" for event in self.events))

    def ended(self) -> int | None:
        self.join(40)
        assert not self.is_alive(), self.events
        return self.code


def test_one_life_that_is_watched_for_a_supervisor_elsewhere_has_the_same_patience(patient_run: Run):
    behave(patient_run, "trainer", f"needs {LONG}")
    life = WatchedLife(patient_run)
    life.ask_to_stop(StopRequest("enough"))
    time.sleep(2 * GRACE)
    behave(patient_run, "trainer", "work")
    assert life.ended() == STOPPED
    assert not [event for event in life.events if event.severity != "info"]


def test_one_life_is_ended_within_the_limit_that_somebody_else_sets(run: Run):
    behave(run, "trainer", f"needs {LONG}")
    life = WatchedLife(run)
    life.ask_to_stop(StopRequest("cancelled", within=2.0))
    assert life.ended() == -signal.SIGKILL


def test_whoever_asks_for_a_stop_from_elsewhere_hears_how_long_it_may_take_and_waits(run: Run):
    behave(run, "trainer", f"needs {LONG}")
    supervised = Supervised(run)
    at_work(run, *ROLES)
    until(lambda: (lease := readable_lease(run, "trainer")) and lease.progress.get("seconds_to_stop") == LONG)
    told: list[Any] = []

    def tell(text: str) -> None:
        told.append(text)
        behave(run, "trainer", "work")

    assert stop(run, "enough", tell=tell).startswith("r has stopped")
    assert told == ["r is stopping; trainer needs up to about 300 s"]
    assert isinstance(supervised.ended(), Stopped)
