import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from flows.commands.scale import scale
from flows.commands.stop import stop
from flows.planning.create import resume
from flows.planning.run_summary import summarise
from flows.supervision.alarms import how_far
from flows.supervision.gpus import Devices
from flows.supervision.interfaces import StopRequest
from flows.supervision.processes import FINISHED, STOPPED, LocalLauncher, NotNow, Role, RoleProcess, process_of
from storage import layout
from storage.objects.records import encode, now
from storage.objects.store import Store
from storage.runs.control import change_state, read_state
from storage.runs.events import read_events
from storage.runs.leases import Lease, read_leases
from storage.runs.run import Run
from tba.errors import Damaged, RunFailed, Stopped, StorageError, Superseded
from tests.support.flows.roles import LIMITS, at_work, behave, end_roles, finish, is_running, script, works
from tests.support.flows.supervised import ROLES, Supervised, make_run
from tests.support.sampled_parameters import sampled
from tests.support.waiting import until


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = make_run(tmp_path)
    yield run
    end_roles(run)


class Away:
    """A store that does not answer reads of leases or of the wanted state while `is_away` is set."""

    def __init__(self, store: Store):
        self.store, self.is_away = store, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def read_tagged(self, key: str) -> tuple[bytes, str] | None:
        if self.is_away:
            raise StorageError(f"{key}: the store does not answer")
        return self.store.read_tagged(key)


@pytest.mark.parametrize("name", ["supervisor", "searcher-abc", "searcher--1", "searcher-²", "somebody-001"])
def test_a_lease_of_another_name_belongs_to_no_role(run: Run, name: str):
    assert Role.parse(name) is None
    assert Role.parse(Role("searcher", 12).name) == Role("searcher", 12)


def test_trouble_with_the_store_is_told_once_when_it_begins_and_once_when_it_is_over(run: Run):
    store = Away(run.store)
    supervised = Supervised(replace(run, store=cast(Store, store)))
    at_work(run, *ROLES)
    store.is_away = True
    until(lambda: supervised.said("store-trouble"))
    time.sleep(6 * LIMITS["limits.lease_every"])
    store.is_away = False
    until(lambda: len(supervised.said("store-trouble")) > 1)
    time.sleep(6 * LIMITS["limits.lease_every"])
    told = supervised.said("store-trouble")
    assert [(event.severity, event.is_more_than_news) for event in told] == [("warning", True), ("info", True)]
    finish(run)
    assert supervised.ended() is None


@pytest.mark.parametrize("damage", sampled([b"{", b"", b"[]", b'{"role": "trainer"}'], kept=[b"{"]))
def test_damaged_leases_of_living_roles_are_reported_and_no_role_is_disturbed(run: Run, damage: bytes):
    supervised = Supervised(run)
    leases = at_work(run, *ROLES)
    for name in (*ROLES, "supervisor"):
        path = Path(run.url, layout.lease(name))
        path.write_bytes(damage)
        until(lambda path=path: path.read_bytes() != damage, f"{name} writes its lease again")
    for name in (*ROLES, "supervisor"):
        key = layout.lease(name)
        until(lambda key=key: any(key in it.message for it in supervised.said("lease-damaged")), f"{key} is told")
    assert {role: it.pid for role, it in at_work(run, *ROLES).items()} == {r: it.pid for r, it in leases.items()}
    finish(run)
    assert supervised.ended() is None
    assert not supervised.said("role-silent") and not supervised.said("role-restarting")


def test_a_role_whose_lease_stays_damaged_counts_as_hanging_and_is_replaced_by_its_next_life(run: Run):
    supervised = Supervised(run)
    leases = at_work(run, *ROLES)
    os.kill(leases["trainer"].pid, signal.SIGSTOP)
    Path(run.url, layout.lease("trainer")).write_bytes(b"")
    until(lambda: works(run, "trainer", life=2))
    assert not is_running(leases["trainer"].pid), "never two at once"
    assert {supervised.said("role-silent", of)[0].data["of"] for of in ["trainer"]} == {"trainer"}
    assert all(works(run, role) for role in ROLES[1:]), "nobody else was disturbed"
    finish(run)
    assert supervised.ended() is None


@pytest.mark.parametrize("damage", sampled([b"", b"{", b'{"life": 3, "role": 4}'], kept=[b""]))
def test_a_run_whose_leases_are_all_damaged_is_resumed_and_lives_are_counted_on(run: Run, damage: bytes):
    supervised = Supervised(run)
    at_work(run, *ROLES)
    supervised.request = StopRequest("enough")
    assert isinstance(supervised.ended(), Stopped)
    for name in (*ROLES, "supervisor"):
        Path(run.url, layout.lease(name)).write_bytes(damage)
    began = time.monotonic()
    resume(run.url)
    assert time.monotonic() - began < 20
    again = Supervised(run)
    again_at_work = at_work(run, *ROLES, life=2)
    finish(run)
    assert again.ended() is None
    assert {name for event in again.said("lease-damaged") for name in (*ROLES, "supervisor") if name in event.message}
    lives = [(event["role"], event["life"], event["seq"]) for event in read_events(run)]
    assert len(set(lives)) == len(lives)
    assert all(lease.life >= 2 for lease in again_at_work.values())


def test_a_trainer_that_lives_behind_a_damaged_lease_is_adopted_and_not_joined_by_another(run: Run):
    first = Supervised(run)
    leases = at_work(run, *ROLES)
    second = Supervised(run)
    for name in ROLES:
        Path(run.url, layout.lease(name)).write_bytes(b"")
    assert isinstance(first.ended(), Superseded)
    until(lambda: len(second.said("role-adopted")) == 4, "all are adopted")
    assert {role: lease.pid for role, lease in at_work(run, *ROLES).items()} == {r: it.pid for r, it in leases.items()}
    finish(run)
    assert second.ended() is None
    assert not second.said("role-started")


@pytest.mark.parametrize(
    "damage", sampled([b"", b"[]", b'{"desired": "run", "searchers": "2", "why": "", "changed_at": ""}'], kept=[b""])
)
def test_a_damaged_state_is_restored_by_the_supervisor_and_what_was_wanted_is_kept(run: Run, damage: bytes):
    supervised = Supervised(run)
    leases = at_work(run, *ROLES)
    state = Path(run.url, layout.STATE)
    before = read_state(run)
    state.write_bytes(damage)
    [told] = until(lambda: supervised.said("state-damaged"))
    assert read_state(run) == before
    assert layout.STATE in told.message and "searchers=2" in told.message and told.severity == "warning"
    until(lambda: [event for event in read_events(run) if event["kind"] == "state-damaged"], "it is stored")
    assert {role: it.pid for role, it in at_work(run, *ROLES).items()} == {r: it.pid for r, it in leases.items()}
    state.unlink()
    until(lambda: any("is missing" in it.message for it in supervised.said("state-damaged")))
    assert read_state(run) == before
    assert {role: it.pid for role, it in at_work(run, *ROLES).items()} == {r: it.pid for r, it in leases.items()}
    state.write_bytes(damage)
    supervised.request = StopRequest("enough")
    assert isinstance(supervised.ended(), Stopped)
    assert (read_state(run).desired, read_state(run).searchers) == ("stop", 2)


def test_a_damaged_state_that_nobody_restores_is_refused_until_it_is_removed(run: Run):
    Path(run.url, layout.STATE).write_bytes(b"")
    for ask in (lambda: resume(run.url), lambda: stop(run, "enough"), lambda: scale(run, 3)):
        with pytest.raises(Damaged, match=r"control/state\.json.*remove this object"):
            ask()
    assert isinstance(Supervised(run).ended(), Damaged)
    assert summarise(run).state == "unreadable"
    Path(run.url, layout.STATE).unlink()
    resume(run.url)
    assert (read_state(run).desired, read_state(run).searchers) == ("run", 2)


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


def test_a_searcher_that_leaves_though_it_is_wanted_is_started_again(run: Run):
    supervised = Supervised(run)
    at_work(run, *ROLES)
    behave(run, "searcher-000", "leave")
    until(lambda: supervised.said("role-restarting", "searcher-000"))
    behave(run, "searcher-000", "work")
    until(lambda: works(run, "searcher-000", life=2))
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
