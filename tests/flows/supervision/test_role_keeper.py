"""A keeper acts on a role in each of the states that the role can have. The tests imitate lives, leases and the clock;
no process runs."""

import signal
from pathlib import Path
from typing import Any

import pytest

from flows.supervision.interfaces import Event
from flows.supervision.processes import FINISHED, GAVE_UP, MISUSED, STOPPED, SUPERSEDED, NotNow, Role
from flows.supervision.role_keeper import PATIENCE, RoleKeeper
from flows.supervision.role_states import (
    EVALUATOR,
    TRAINER,
    Absent,
    Elsewhere,
    Finished,
    Started,
    Watched,
    WatchedRoles,
)
from flows.supervision.stopping import INSIST_EVERY
from storage import layout
from storage.objects import records
from storage.runs.control import change_state
from storage.runs.leases import Lease
from storage.runs.run import Run
from tba.config import parse
from tba.errors import RunFailed
from tests.support.flows.leases_seen import Clock
from tests.support.flows.supervised import make_run

SEARCHER = Role("searcher", 1)


class FakeLife:
    """A life that ends when the test says so, and records the signals that it is sent."""

    where, waits_for = "somewhere", "no machine has taken it"

    def __init__(self, role: Role, number: int):
        self.role, self.number = role, number
        self.code: int | None = None
        self.sent: list[str] = []
        self.is_let_go = False

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.sent.append("SIGTERM")

    def kill(self) -> None:
        self.sent.append("SIGKILL")

    def let_go(self) -> None:
        self.is_let_go = True

    def last_words(self) -> str:
        return "error: there is no such model"


class FakeLauncher:
    start_deadline, end_grace, last_word_after = 60.0, 10.0, 1e9

    def __init__(self) -> None:
        self.refusal = ""
        self.lives: list[FakeLife] = []
        self.tidied: list[FakeLife] = []

    def start(self, role: Role, number: int) -> FakeLife:
        if self.refusal:
            raise NotNow(self.refusal)
        self.lives.append(FakeLife(role, number))
        return self.lives[-1]

    def ended(self, life: FakeLife) -> None:
        self.tidied.append(life)

    def close(self) -> None: ...


class Kept:
    """A keeper with everything that it needs, with leases that the test writes, and with the events of the keeper."""

    def __init__(self, run: Run, clock: Clock):
        self.run, self.clock, self.launcher = run, clock, FakeLauncher()
        self.events: list[Event] = []
        limits = parse(run.config).limits
        self.roles = WatchedRoles(run, limits, first_delay=1.0, tell=self.tell)
        self.keeper = RoleKeeper(run, self.launcher, limits, self.roles, self.tell)
        self.roles.read_leases()

    def tell(self, kind: str, message: str, severity: str = "info", **data: Any) -> None:
        self.events.append(Event(kind, message, severity, data))

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    def write_lease(self, role: Role, life: int, counter: int, status: str = "works", **fields: Any) -> None:
        """Write a lease as a role of another machine, which nobody can reach from here."""
        lease = Lease(
            role=role.name, life=life, host="elsewhere", pid=7, counter=counter, status=status,
            renewed_at=records.now(), supervised=True, **fields,
        )  # fmt: skip
        found = self.run.store.read_tagged(layout.lease(role.name))
        self.run.store.replace(layout.lease(role.name), records.encode(vars(lease)), tag=found[1] if found else None)
        self.roles.read_leases()

    def attend(self, role: Role = SEARCHER) -> Watched:
        w = self.roles.know(role)
        self.keeper.attend(w)
        return w

    def end(self, code: int, role: Role = SEARCHER) -> Watched:
        """End the life that is started, and let the keeper find that out."""
        self.launcher.lives[-1].code = code
        return self.attend(role)

    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        self.roles.last_look = self.clock.now  # so that this does not look like a blind time


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    return Kept(make_run(tmp_path), Clock(monkeypatch))


def test_an_absent_role_is_started_under_a_life_beyond_that_of_its_lease(kept: Kept):
    kept.write_lease(SEARCHER, life=4, counter=9, status="stopped")
    w = kept.attend()
    assert isinstance(w.state, Started) and w.life is kept.launcher.lives[0]
    assert w.number == 5
    assert kept.events == [Event("role-started", "searcher-001, life 5: somewhere", "info", w.about)]
    assert kept.attend().number == 5, "one that runs is left alone"


@pytest.mark.parametrize("code", [1, STOPPED, -signal.SIGKILL])
def test_a_life_that_ends_too_early_is_followed_by_the_next_after_the_delay(kept: Kept, code: int):
    kept.attend()
    w = kept.end(code)
    assert isinstance(w.state, Absent) and kept.launcher.tidied == kept.launcher.lives
    assert kept.kinds == ["role-started", "role-ended", "role-restarting"]
    assert kept.attend().life is None
    kept.wait(1.0)
    assert kept.attend().number == 2


def test_a_life_that_ends_finished_is_the_last(kept: Kept):
    kept.attend()
    assert isinstance(kept.end(FINISHED).state, Finished)
    kept.wait(1000)
    assert isinstance(kept.attend().state, Finished)
    assert kept.kinds == ["role-started", "role-ended"]


@pytest.mark.parametrize(("code", "said"), [(MISUSED, "cannot work with its settings"), (GAVE_UP, "waited too long")])
def test_an_end_that_another_life_would_not_mend_fails_the_run(kept: Kept, code: int, said: str):
    kept.attend()
    with pytest.raises(RunFailed, match=f"searcher-001 .*{said}.*there is no such model"):
        kept.end(code)


def test_a_life_that_was_superseded_is_not_replaced_and_its_successor_is_adopted(kept: Kept):
    kept.attend()
    kept.write_lease(SEARCHER, life=2, counter=1)
    kept.end(SUPERSEDED)
    assert isinstance(kept.attend().state, Elsewhere)
    kept.write_lease(SEARCHER, life=2, counter=2)
    assert kept.attend().is_adopted
    assert kept.kinds == ["role-started", "role-ended", "role-adopted"]


def test_a_life_that_takes_no_lease_is_reported_then_killed_again_and_again_then_given_up(kept: Kept):
    w = kept.attend()
    life = kept.launcher.lives[0]
    kept.wait(PATIENCE + 1)
    kept.attend()
    kept.attend()
    assert kept.kinds == ["role-started", "role-waiting"]
    assert "no machine has taken it" in kept.events[-1].message
    kept.wait(kept.launcher.start_deadline)
    kept.attend()
    assert kept.kinds[2:] == ["role-silent"] and life.sent == ["SIGKILL"]
    kept.wait(INSIST_EVERY)
    kept.attend()
    kept.attend()
    assert life.sent == ["SIGKILL"] * 2
    kept.wait(kept.launcher.end_grace)
    kept.attend()
    assert kept.kinds[3:] == ["role-lost", "role-restarting"] and life.is_let_go
    assert isinstance(w.state, Absent)


def test_a_second_life_in_a_row_that_takes_no_lease_fails_the_run(kept: Kept):
    for deadline in (60.0, 60.0):
        w = kept.attend()
        kept.wait(deadline + 1)
        kept.attend()
        kept.launcher.lives[-1].code = -signal.SIGKILL
        if len(kept.launcher.lives) == 2:
            break
        kept.attend()
        kept.wait(1.0)
    with pytest.raises(RunFailed, match="searcher-001 took no lease in 60 s, twice"):
        kept.keeper.attend(w)


def test_a_life_whose_lease_falls_silent_is_killed(kept: Kept):
    kept.attend()
    kept.write_lease(SEARCHER, life=1, counter=1)
    kept.wait(4.0)
    kept.roles.read_leases()
    kept.attend()
    assert kept.kinds == ["role-started", "role-silent"]
    assert kept.launcher.lives[0].sent == ["SIGKILL"]


def test_the_last_status_of_a_lease_is_the_end_if_nobody_else_reports_it(kept: Kept):
    kept.launcher.last_word_after = 0.5
    kept.attend()
    kept.write_lease(SEARCHER, life=1, counter=1, status="finished")
    assert kept.attend().life
    kept.wait(1.0)
    kept.roles.read_leases()
    assert isinstance(kept.attend().state, Finished)
    assert kept.events[-1].data["code"] == FINISHED


def test_a_life_that_nobody_here_started_is_adopted_once_its_lease_moves(kept: Kept):
    kept.write_lease(SEARCHER, life=3, counter=8)
    w = kept.attend()
    assert isinstance(w.state, Elsewhere) and not w.is_adopted and not kept.events
    kept.write_lease(SEARCHER, life=3, counter=9)
    assert kept.attend().is_adopted and w.number == 3
    assert kept.events == [Event("role-adopted", "searcher-001 is adopted: pid 7 on elsewhere", "info", w.about)]
    kept.attend()
    assert len(kept.events) == 1 and not kept.launcher.lives


@pytest.mark.parametrize(("status", "state", "kinds"), [
    ("finished", Finished, ["role-ended"]),
    ("stopped", Absent, ["role-ended", "role-restarting"]),
])  # fmt: skip
def test_an_adopted_life_that_ends_is_replaced_unless_it_has_finished(kept: Kept, status: str, state: type, kinds):
    for counter in (8, 9):
        kept.write_lease(SEARCHER, life=3, counter=counter)
        kept.attend()
    kept.write_lease(SEARCHER, life=3, counter=10, status=status)
    assert isinstance(kept.attend().state, state)
    assert kept.kinds == ["role-adopted", *kinds]


def test_a_lease_that_never_moves_is_told_once_and_its_role_is_started(kept: Kept):
    kept.write_lease(SEARCHER, life=3, counter=8)
    kept.attend()
    kept.launcher.refusal = "no room"
    kept.wait(4.0)
    kept.roles.read_leases()
    kept.attend()
    kept.wait(1.0)
    kept.launcher.refusal = ""
    assert kept.attend().number == 4
    assert kept.kinds == ["role-silent", "role-waiting", "role-started"]


def test_a_role_that_cannot_be_started_is_reported_once_for_each_reason_until_the_deadline(kept: Kept):
    deadline = kept.keeper.limits.data_deadline
    for reason in ("no room", "no room", "no machine", "no room"):
        kept.launcher.refusal = reason
        kept.attend()
        kept.attend()
        kept.wait(deadline / 4)
    assert [event.message.rpartition(": ")[2] for event in kept.events] == ["no room", "no machine", "no room"]
    kept.wait(1.0)
    with pytest.raises(RunFailed, match=f"could not be started for {deadline + 1:.0f} s: no room"):
        kept.attend()


def test_a_searcher_too_many_is_asked_and_then_made_to_end(kept: Kept):
    w = kept.attend()
    change_state(kept.run, searchers=1)
    kept.roles.read_leases()
    assert kept.roles.unwanted() == [w]
    kept.keeper.drain(w)
    assert kept.events[-1].message == "searcher-001 is asked to stop: the run wants only 1 searcher(s)"
    life, grace = kept.launcher.lives[0], kept.keeper.limits.stop_grace
    kept.keeper.drain(w)
    assert not life.sent
    kept.wait(grace + 1)
    kept.keeper.drain(w)
    kept.wait(kept.launcher.end_grace)
    kept.keeper.drain(w)
    assert life.sent == ["SIGTERM", "SIGKILL"]
    life.code = -signal.SIGKILL
    kept.keeper.drain(w)
    assert isinstance(w.state, Absent) and w.draining is None
    assert kept.kinds[-1] == "role-ended", "and is not started again"


def test_a_searcher_that_ends_as_it_was_asked_to_costs_no_restart_where_it_is_wanted_again(kept: Kept):
    w = kept.attend()
    change_state(kept.run, searchers=1)
    kept.roles.read_leases()
    kept.keeper.drain(w)
    change_state(kept.run, searchers=2)
    kept.end(STOPPED)
    assert kept.attend().number == 2
    assert kept.kinds == ["role-started", "role-draining", "role-ended", "role-started"]


def test_once_the_trainer_has_finished_nobody_wants_searchers_and_none_is_started(kept: Kept):
    assert kept.roles.wanted() == [TRAINER, Role("searcher", 0), SEARCHER, EVALUATOR]
    kept.attend(TRAINER)
    kept.end(FINISHED, TRAINER)
    assert kept.roles.wanted() == [TRAINER, EVALUATOR]
    assert kept.attend().life is None
    assert not kept.roles.have_finished()
    kept.attend(EVALUATOR)
    kept.end(FINISHED, EVALUATOR)
    assert kept.roles.have_finished()


def test_whoever_has_a_life_or_a_lease_that_moves_is_alive(kept: Kept):
    kept.attend()
    kept.write_lease(TRAINER, life=1, counter=1)
    kept.write_lease(EVALUATOR, life=1, counter=1, status="stopped")
    assert {w.role for w in kept.roles.alive()} == {SEARCHER, TRAINER}
    assert set(kept.roles.open_leases()) == {"trainer"}
    kept.wait(4.0)
    kept.roles.read_leases()
    assert {w.role for w in kept.roles.alive()} == {SEARCHER}


def test_after_a_blind_time_nobody_is_taken_for_dead(kept: Kept):
    kept.write_lease(TRAINER, life=1, counter=1)
    kept.clock.now += 100
    kept.roles.read_leases()
    assert kept.roles.moves(kept.roles.know(TRAINER))
