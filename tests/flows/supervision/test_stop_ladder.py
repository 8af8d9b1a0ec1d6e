"""Which signals end roles that do not stop by themselves, and after how many seconds. The tests control the clock."""

import signal

import pytest

from flows.supervision.stopping import INSIST_EVERY, SAFETY, Draining, RepeatedKill, Rung, StopLadder
from storage.runs.lease_watch import Seen
from tba.config import LimitsConfig
from tests.support.flows.leases_seen import Clock, seen

LIMITS = LimitsConfig(stop_grace=60.0)
NEEDS_100 = seen(seconds_to_stop=100)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def seconds_on(rung: Rung, clock: Clock, role: Seen | None) -> float:
    """Return the seconds that a rung waits for a role that keeps saying the same."""
    began = clock.now
    while not rung.wait.is_over("trainer", role):
        clock.now += 0.5
    return clock.now - began


def climb(ladder: StopLadder, clock: Clock, role: Seen | None, was_asked: bool = True) -> list[tuple[str, float]]:
    """Return the signals of a ladder, each with the seconds until the next rung."""
    rungs = ladder.rungs(was_asked)
    return [(rung.signal.name if rung.signal else "asked", seconds_on(rung, clock, role)) for rung in rungs]


def test_roles_are_asked_then_terminated_then_killed(clock: Clock):
    assert climb(StopLadder(LIMITS, end_grace=10), clock, None) == [
        ("asked", 60.5),
        ("SIGTERM", 10.5),
        ("SIGKILL", 10.5),
    ]


def test_a_role_that_says_it_needs_longer_is_waited_for_before_the_first_signal_only(clock: Clock):
    climbed = climb(StopLadder(LIMITS, end_grace=10), clock, NEEDS_100)
    assert climbed == [("asked", SAFETY * 100 + 0.5), ("SIGTERM", 10.5), ("SIGKILL", 10.5)]


def test_roles_that_could_not_be_asked_are_given_their_time_after_sigterm(clock: Clock):
    climbed = climb(StopLadder(LIMITS, end_grace=10), clock, NEEDS_100, was_asked=False)
    assert climbed == [("SIGTERM", SAFETY * 100 + 0.5), ("SIGKILL", 10.5)]


def test_a_ladder_fits_into_the_seconds_that_are_left(clock: Clock):
    ladder = StopLadder(LIMITS, end_grace=10, within=20)
    assert ladder.patience.cut_short({"trainer": NEEDS_100})
    climbed = climb(ladder, clock, NEEDS_100)
    assert climbed == [("asked", 14.5), ("SIGTERM", 4.5), ("SIGKILL", 4.5)]
    assert [seconds for _, seconds in climb(StopLadder(LIMITS, end_grace=1, within=20), clock, None)[1:]] == [1.5, 1.5]


def test_a_searcher_too_many_is_asked_then_terminated_then_killed(clock: Clock):
    draining = Draining(LIMITS, end_grace=10)
    signals = []
    for _ in range(80):
        signals.append(draining.due_signal(None))
        clock.now += 1
    assert signals[:61] == [None] * 61
    assert signals[61:71] == [signal.SIGTERM] * 10
    assert signals[71:] == [signal.SIGKILL] * 9


def test_a_searcher_too_many_that_needs_longer_and_says_so_hears_no_signal_meanwhile(clock: Clock):
    draining = Draining(LIMITS, end_grace=10)
    while draining.due_signal(NEEDS_100) is None:
        clock.now += 1
    assert clock.now - draining.patience.began == SAFETY * 100 + 1


def test_a_kill_is_repeated_from_time_to_time_until_the_life_is_lost():
    kill = RepeatedKill(now=0.0)
    due = [moment for moment in range(100) if kill.is_due(moment)]
    assert due == [*range(int(INSIST_EVERY), 100, int(INSIST_EVERY))]
    assert not kill.is_lost(now=30.0, end_grace=30.0)
    assert kill.is_lost(now=30.1, end_grace=30.0)
