"""Roles that are killed, fall silent, fail or never begin: a supervisor starts them again, or fails the run."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from flows.supervision.alarms import how_far
from flows.supervision.gpus import Devices
from flows.supervision.processes import FINISHED, STOPPED, LocalLauncher, NotNow, Role, RoleProcess
from storage import layout
from storage.objects.records import encode, now
from storage.runs.control import read_state
from storage.runs.leases import Lease, read_leases
from storage.runs.run import Run
from tba.errors import RunFailed, Superseded
from tests.support.flows.roles import at_work, behave, finish, is_running, script, works
from tests.support.flows.supervised import ROLES, Supervised, make_run
from tests.support.waiting import until


def test_a_killed_role_is_started_again_and_the_run_finishes(run: Run):
    supervised = Supervised(run)
    leases = at_work(run, *ROLES)
    for role in ("trainer", "searcher-001"):
        os.kill(leases[role].pid, signal.SIGKILL)
    for role in ("trainer", "searcher-001"):
        assert until(lambda role=role: works(run, role, life=2)).pid != leases[role].pid
    assert until(lambda: works(run, "searcher-000")).life == 1
    finish(run)
    assert supervised.ended() is None
    (ended,) = supervised.said("role-ended", "searcher-001")[:1]
    assert "SIGKILL" in ended.message
    assert (Path(run.url) / "logs/searcher-001-0002.log").exists()


def test_a_role_whose_lease_falls_silent_is_reported_killed_and_started_again(run: Run):
    supervised = Supervised(run)
    leases = at_work(run, *ROLES)
    behave(run, "searcher-000", "hang")
    until(lambda: supervised.said("role-silent", "searcher-000"), "reported")
    behave(run, "searcher-000", "work")
    until(lambda: works(run, "searcher-000", life=2))
    assert not is_running(leases["searcher-000"].pid)
    finish(run)
    assert supervised.ended() is None


def test_a_role_that_keeps_failing_fails_the_run_with_its_last_words(run: Run):
    behave(run, "searcher-001", "fail")
    supervised = Supervised(run)
    error = supervised.ended()
    assert isinstance(error, RunFailed)
    assert "searcher-001 ended 3 times" in str(error)
    assert "there is no such model" in str(error)
    assert read_state(run).desired == "stop"
    assert not supervised.said("role-left")
    assert all(lease.status in ("stopped", "failed") for lease in read_leases(run))


def test_a_role_that_was_asked_the_impossible_fails_the_run_at_once(run: Run):
    behave(run, "trainer", "misuse")
    supervised = Supervised(run)
    error = supervised.ended()
    assert isinstance(error, RunFailed)
    assert len(supervised.said("role-started", "trainer")) == 1
    first = "trainer cannot work with its settings or data; there is no such model; pid "
    assert str(error).startswith(first) and "\n" not in str(error), "the cause, without the words around it"
    assert read_state(run).why.startswith(f"failed: {first}")
    (ended,) = supervised.said("role-ended", "trainer")
    assert ended.message == "trainer, life 1, failed with exit code 2: there is no such model"


class Lost:
    """A life on a machine that is gone: its end is never reported, and no signal reaches it."""

    where, waits_for = "somewhere", "no machine has taken it"

    def __init__(self, role: Role, number: int):
        self.role, self.number = role, number
        self.kills = 0

    def poll(self) -> None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None:
        self.kills += 1

    def let_go(self) -> None: ...

    def last_words(self) -> str:
        return ""


class Losing(LocalLauncher):
    """A launcher that loses the first lives of one role."""

    end_grace = 1.0

    def __init__(self, run: Run, role: str, lives: int = 1):
        super().__init__(run, command=script, devices=Devices(run.url, uuids=[]))
        self.loses, self.left = role, lives
        self.lost: list[Lost] = []
        self.is_lost = False  # whether the latest life of the role is lost

    @property
    def start_deadline(self) -> float:
        """Return a short deadline for a lost life once all other roles have begun."""
        return 1.0 if self.is_lost and len(read_leases(self.run)) == len(ROLES) else 60.0

    def start(self, role: Role, number: int) -> Any:
        if role.name == self.loses:
            self.is_lost = self.left > 0
        if role.name != self.loses or not self.left:
            return super().start(role, number)
        self.left -= 1
        self.lost.append(Lost(role, number))
        return self.lost[-1]


def test_a_life_that_can_neither_be_ended_nor_heard_of_is_given_up_and_replaced(
    run: Run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("flows.supervision.stopping.INSIST_EVERY", 0.3)
    launcher = Losing(run, "searcher-001")
    supervised = Supervised(run, launcher=launcher)
    until(lambda: works(run, "searcher-001"))
    assert [e.kind for e in supervised.events if e.data.get("of") == "searcher-001"][:5] == [
        "role-started", "role-silent", "role-lost", "role-restarting", "role-started",
    ]  # fmt: skip
    assert launcher.lost[0].kills > 1
    finish(run)
    assert supervised.ended() is None


class Unwatched(LocalLauncher):
    """A launcher whose watching processes have been killed: only the lives themselves report how they end."""

    last_word_after = 0.5

    def __init__(self, run: Run):
        super().__init__(run, command=script, devices=Devices(run.url, uuids=[]))

    def start(self, role: Role, number: int) -> RoleProcess:
        life = super().start(role, number)
        life.poll = lambda: None
        return life

    def ended(self, life: RoleProcess) -> None:
        life.process.wait()
        super().ended(life)


def test_the_last_status_of_a_role_counts_if_nobody_else_reports_its_end(run: Run):
    supervised = Supervised(run, launcher=Unwatched(run))
    at_work(run, *ROLES)
    behave(run, "searcher-001", "leave")
    until(lambda: supervised.said("role-ended", "searcher-001"))
    behave(run, "searcher-001", "work")
    at_work(run, "searcher-001", life=2)
    finish(run)
    assert supervised.ended() is None
    assert not supervised.said("role-silent") and not supervised.said("role-stopping")
    assert {of: supervised.said("role-ended", of)[0].data["code"] for of in ROLES} == {
        "trainer": FINISHED, "evaluator": FINISHED, "searcher-000": STOPPED, "searcher-001": STOPPED,
    }  # fmt: skip


def test_a_role_that_never_begins_fails_the_run_and_says_before_what_it_waits_for(
    run: Run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("flows.supervision.role_keeper.PATIENCE", 0.3)
    supervised = Supervised(run, launcher=Losing(run, "searcher-001", lives=9))
    error = supervised.ended()
    assert isinstance(error, RunFailed)
    assert "searcher-001 took no lease in 1 s, twice" in str(error)
    assert "no machine has taken it" in supervised.said("role-waiting", "searcher-001")[0].message


@pytest.mark.parametrize(
    ("word", "of", "said"),
    [
        ("in-vain", "trainer", "trainer has waited too long for another role"),
        ("superseded", "searcher-001", "searcher-001 ended 3 times .* superseded"),
    ],
)
def test_an_end_that_another_life_would_not_mend_fails_the_run(run: Run, word: str, of: str, said: str):
    behave(run, of, word)
    with pytest.raises(RunFailed, match=said):
        raise Supervised(run).ended() or AssertionError


def test_a_role_that_fails_slowly_without_getting_any_further_fails_the_run(tmp_path: Path):
    run = make_run(tmp_path, {"limits.restart_window": 0.1})
    behave(run, "searcher-001", "turn")
    error = Supervised(run).ended()
    assert isinstance(error, RunFailed)
    assert "searcher-001 ended 3 times without making progress" in str(error)


def test_a_searcher_that_stores_groups_of_an_earlier_round_than_its_last_life_has_got_further():
    said = [Lease(
        role="searcher-000", life=life, host="here", pid=1, counter=1, status="round", renewed_at=now(),
        supervised=True, progress={"round": round, "shards": shards, "tokens": tokens},
    ) for life, round, shards, tokens in ((1, 9, 7, 900), (2, 6, 8, 100))]  # fmt: skip
    assert how_far(said[1]) > how_far(said[0])


def test_a_role_whose_work_stands_still_while_its_lease_is_renewed_is_replaced(tmp_path: Path):
    run = make_run(tmp_path, {"limits.data_deadline": 2.0})
    behave(run, "searcher-001", "stuck")
    supervised = Supervised(run)
    until(lambda: supervised.said("role-silent", "searcher-001"))
    behave(run, "searcher-001", "work")
    until(lambda: works(run, "searcher-001", life=2))
    assert "has done no work" in supervised.said("role-silent", "searcher-001")[0].message
    finish(run)
    assert supervised.ended() is None


class Full(LocalLauncher):
    """A launcher without room for one role."""

    def __init__(self, run: Run, role: str):
        super().__init__(run, command=script, devices=Devices(run.url, uuids=[]))
        self.without = role

    def start(self, role: Role, number: int) -> Any:
        if role.name == self.without:
            raise NotNow("no room")
        return super().start(role, number)


def test_a_role_that_cannot_be_started_is_reported_once_and_fails_the_run_at_its_deadline(tmp_path: Path):
    run = make_run(tmp_path, {"limits.data_deadline": 3.0})
    dead = Lease(
        role="searcher-001", life=1, host="elsewhere", pid=1, counter=7, status="round 3", renewed_at=now(),
        supervised=True,
    )  # fmt: skip
    run.store.replace(layout.lease("searcher-001"), encode(vars(dead)), tag=None)
    supervised = Supervised(run, launcher=Full(run, "searcher-001"))
    error = supervised.ended()
    assert isinstance(error, RunFailed)
    assert "searcher-001 could not be started for 3 s: no room" in str(error)
    assert len(supervised.said("role-silent", "searcher-001")) == 1
    assert len(supervised.said("role-waiting", "searcher-001")) == 1


def test_a_silent_role_that_nobody_here_started_is_replaced(run: Run):
    first = Supervised(run)
    leases = at_work(run, *ROLES)
    second = Supervised(run)
    assert isinstance(first.ended(), Superseded)
    os.kill(leases["trainer"].pid, signal.SIGSTOP)
    until(lambda: works(run, "trainer", life=2))
    assert second.said("role-silent", "trainer")
    assert not is_running(leases["trainer"].pid)
    finish(run)
    assert second.ended() is None


def test_a_searcher_that_leaves_though_it_is_wanted_is_started_again(run: Run):
    supervised = Supervised(run)
    at_work(run, *ROLES)
    behave(run, "searcher-000", "leave")
    until(lambda: supervised.said("role-restarting", "searcher-000"))
    behave(run, "searcher-000", "work")
    until(lambda: works(run, "searcher-000", life=2))
    finish(run)
    assert supervised.ended() is None
