"""A supervisor over storage in trouble: a store that does not answer, and damaged leases and states."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from flows.commands.scale import scale
from flows.commands.stop import stop
from flows.planning.create import resume
from flows.planning.run_summary import summarise
from flows.supervision.interfaces import StopRequest
from storage import layout
from storage.objects.store import Store
from storage.runs.control import read_state
from storage.runs.events import read_events
from storage.runs.run import Run
from tba.errors import Damaged, Stopped, StorageError, Superseded
from tests.support.flows.roles import LIMITS, at_work, finish, is_running, works
from tests.support.flows.supervised import ROLES, Supervised
from tests.support.sampled_parameters import sampled
from tests.support.waiting import until


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
