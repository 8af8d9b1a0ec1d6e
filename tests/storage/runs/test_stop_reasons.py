"""The reasons for which a role has to stop, and how often its lease shows that it is alive."""

from pathlib import Path

import pytest

from storage import layout
from storage.runs.control import change_state
from storage.runs.held_lease import HeldLease
from storage.runs.leases import SUPERVISOR
from storage.runs.run import Run
from storage.runs.signs_of_life import SignsOfLife
from storage.runs.stop_reasons import StopReasons
from tba.errors import Damaged

local = pytest.mark.parametrize("root", ["local"], indirect=True)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


@local
def test_the_first_reason_to_stop_stays(run: Run):
    reasons = StopReasons(run, "searcher-002", index=2)
    change_state(run, searchers=3)
    reasons.look()
    assert reasons.reason is None
    reasons.ask("SIGTERM")
    change_state(run, desired="stop", why="enough")
    reasons.look()
    reasons.ask("SIGINT")
    assert str(reasons.reason) == "searcher-002 was asked to stop: SIGTERM"


@local
def test_a_state_that_cannot_be_read_hides_no_missing_supervisor(run: Run, clock: list[float]):
    change_state(run, searchers=1)
    (Path(run.url) / layout.STATE).write_bytes(b"{")
    reasons = StopReasons(run, "trainer", orphan_after=10.0)
    with pytest.raises(Damaged, match=r"control/state\.json"):
        reasons.look()
    assert reasons.reason is None
    clock[0] += 11
    with pytest.raises(Damaged, match=r"control/state\.json"):
        reasons.look()
    assert str(reasons.reason) == "trainer has seen no supervisor for 11 s"


@local
def test_a_supervisor_that_moves_is_a_reason_to_go_on(run: Run, clock: list[float]):
    supervisor = HeldLease(run, SUPERVISOR, every=3600.0)
    reasons = StopReasons(run, "trainer", orphan_after=10.0)
    reasons.look()
    clock[0] += 9
    supervisor.close()
    reasons.look()
    clock[0] += 9
    reasons.look()
    assert reasons.reason is None
    clock[0] += 2
    reasons.look()
    assert reasons.reason is not None


def test_signs_tell_of_quiet_and_only_looks_count_as_gaps(clock: list[float]):
    signs = SignsOfLife()
    clock[0] += 100
    assert (signs.quiet(), signs.longest_gap()) == (100, 0)
    signs.give_by_look()
    clock[0] += 30
    signs.give()
    assert (signs.quiet(), signs.longest_gap()) == (0, 0)
    clock[0] += 10
    signs.give_by_look()
    assert signs.longest_gap() == 40
    clock[0] += 601
    signs.give_by_look()
    clock[0] += 1
    signs.give_by_look()
    assert signs.longest_gap() == 601
