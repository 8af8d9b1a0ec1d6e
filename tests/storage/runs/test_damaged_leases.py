"""Damaged leases and a damaged state: what is replaced, what is written again, and what other roles notice."""

import json
import time
from pathlib import Path

import pytest

from storage import layout
from storage.maintenance.check import check
from storage.objects import records
from storage.runs.control import change_state
from storage.runs.events import Events, read_events
from storage.runs.held_lease import HeldLease
from storage.runs.lease_watch import LeaseWatch
from storage.runs.leases import SUPERVISOR, read_lease, read_leases, read_roles, readable_lease
from storage.runs.run import Run
from tba.errors import Damaged, Stopped, Superseded
from tests.support.storage.held_leases import EVERY, check_until, counter
from tests.support.waiting import until

local = pytest.mark.parametrize("root", ["local"], indirect=True)
WHOLE = {
    "role": "trainer", "life": 7, "host": "here", "pid": 4, "counter": 2, "status": "step 3", "progress": {"step": 3.0},
    "renewed_at": records.now(), "supervised": True, "quiet": 0.5,
}  # fmt: skip
DAMAGES = {
    "empty": b"",
    "not JSON": b"\x00\xff lease",
    "a list": b"[]",
    "truncated": records.encode(WHOLE)[:60],
    "a field is missing": records.encode({name: value for name, value in WHOLE.items() if name != "host"}),
    "another's": records.encode({**WHOLE, "role": "evaluator"}),
    **{
        f"{name}={value!r}": json.dumps({**WHOLE, name: value}).encode()
        for name, value in [
            ("life", "7"),
            ("life", True),
            ("life", 0),
            ("life", 10**12),
            ("counter", -1),
            ("pid", float("inf")),
            ("quiet", float("nan")),
            ("quiet", None),
            ("disk_gb", "much"),
            ("renewed_at", "yesterday"),
            ("renewed_at", "2026-01-01T00:00:00"),
            ("status", 4),
            ("progress", []),
            ("progress", {"step": "3"}),
            ("progress", {"step": float("nan")}),
        ]
    },
}
damaged = pytest.mark.parametrize("data", DAMAGES.values(), ids=DAMAGES)


def lease_file(run: Run, role: str = "trainer") -> Path:
    path = Path(run.url) / layout.lease(role)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def damages(run: Run) -> list[str]:
    return [event["message"] for event in read_events(run) if event["kind"] == "lease-damaged"]


@local
@damaged
def test_a_lease_that_is_none_is_named_and_hides_no_other(run: Run, data: bytes):
    change_state(run, searchers=1)
    HeldLease(run, "evaluator", every=60.0).close()
    lease_file(run).write_bytes(data)
    with pytest.raises(Damaged, match=r"roles/trainer/lease\.json"):
        read_lease(run, "trainer")
    assert readable_lease(run, "trainer") is None
    assert [lease.role for lease in read_leases(run)] == ["evaluator"]
    assert "roles/trainer/lease.json" in read_roles(run).damaged["trainer"]
    assert [problem.key for problem in check(run).problems] == [layout.lease("trainer")]


@local
@damaged
def test_a_damaged_lease_is_replaced_under_a_life_beyond_every_known_one(run: Run, data: bytes):
    Events(run, "trainer", 3).write("started", "life 3")
    run.store.create(layout.log("trainer", 5), b"a life that wrote no event")
    run.store.create(layout.log("trainer-of-another", 40), b"of another role")
    lease_file(run).write_bytes(data)
    with HeldLease(run, "trainer", every=60.0) as held:
        assert held.life in (6, 8), "beyond its log, or beyond what the remains say"
        assert held.life == 8 or b'"life": 7' not in data
        held.check()
    [told] = damages(run)
    assert "roles/trainer/lease.json" in told and f"life {held.life} has replaced it" in told


@local
def test_a_lease_that_is_gone_is_taken_under_a_life_beyond_those_with_events(run: Run):
    Events(run, "trainer", 3).write("started", "life 3")
    with HeldLease(run, "trainer", every=60.0) as held:
        assert held.life == 4
    assert not damages(run)


@local
@damaged
def test_a_lease_that_is_damaged_while_it_is_held_is_written_again_by_its_holder(run: Run, data: bytes):
    with HeldLease(run, "trainer", every=EVERY) as held:
        held.tell("learning", step=3)
        lease_file(run).write_bytes(data)
        until(lambda: readable_lease(run, "trainer") is not None and counter(run, "trainer") > 0)
        before = counter(run, "trainer")
        until(lambda: counter(run, "trainer") > before)
        held.check()
        lease = read_lease(run, "trainer")
        assert lease is not None and (lease.life, lease.status) == (1, "learning")
    [told] = damages(run)
    assert "roles/trainer/lease.json" in told and "trainer, which holds it, has written it again" in told


@local
def test_of_two_lives_the_higher_one_keeps_a_lease_that_was_damaged(run: Run):
    old = HeldLease(run, "trainer", every=60.0)  # renewed only once, at its close
    Events(run, "trainer", old.life).write("started", "the first")
    new = HeldLease(run, "trainer", every=60.0)
    Events(run, "trainer", new.life).write("started", "the second")
    lease_file(run).write_bytes(b"")
    old.close("failed")
    with pytest.raises(Superseded):
        old.check()
    new.close()
    new.check()
    lease = read_lease(run, "trainer")
    assert lease is not None and (lease.life, lease.status) == (2, "stopped")


@local
def test_a_lease_that_was_put_back_to_an_older_life_is_taken_back(run: Run):
    HeldLease(run, "trainer", every=60.0).close()
    before = lease_file(run).read_bytes()
    with HeldLease(run, "trainer", every=EVERY) as held:
        lease_file(run).write_bytes(before)
        until(lambda: (lease := read_lease(run, "trainer")) is not None and lease.life == 2)
        held.check()
    assert len(damages(run)) == 1


@local
def test_two_processes_of_one_life_do_not_both_keep_the_lease(run: Run):
    with HeldLease(run, "trainer", every=EVERY) as held:
        lease = read_lease(run, "trainer")
        lease_file(run).write_bytes(records.encode({**vars(lease), "pid": 1, "host": "elsewhere"}))
        check_until(held, Superseded, "trainer")


@local
@pytest.mark.parametrize("before", [False, True])
def test_a_damaged_lease_of_the_supervisor_is_silence(run: Run, before: bool):
    if not before:
        HeldLease(run, SUPERVISOR, every=60.0).close()
    lease_file(run, SUPERVISOR).write_bytes(b"{")
    with HeldLease(run, "trainer", every=EVERY, orphan_after=0.3) as held:
        check_until(held, Stopped, "no supervisor")


@local
def test_a_damaged_state_keeps_no_role_from_noticing_that_its_supervisor_is_gone(run: Run):
    change_state(run, searchers=2)
    (Path(run.url) / layout.STATE).write_bytes(b"{")
    with HeldLease(run, "trainer", every=EVERY, orphan_after=0.3) as held:
        check_until(held, Stopped, "no supervisor")


@local
def test_whoever_nobody_supervises_gives_its_lease_back_if_the_state_cannot_be_read(run: Run):
    change_state(run, searchers=2)
    (Path(run.url) / layout.STATE).write_bytes(b"{")
    with pytest.raises(Damaged, match=r"control/state\.json"):
        HeldLease(run, SUPERVISOR, every=EVERY)
    lease = read_lease(run, SUPERVISOR)
    assert lease is not None and lease.status == "failed"


@local
def test_a_watcher_shows_a_damaged_lease_as_it_was_read_last_and_as_one_that_does_not_move(run: Run):
    watch, other = LeaseWatch(), LeaseWatch()
    with HeldLease(run, "evaluator", every=60.0), HeldLease(run, "trainer", every=60.0):
        watch.observe(run)
        lease_file(run).write_bytes(b"")
        Events(run, "trainer", 1).write("started", "it lives")
        seen = {name: it.observe(run) for name, it in (("knows it", watch), ("is new", other))}
        assert all(set(it) == {"evaluator", "trainer"} for it in seen.values())
        assert {name: it["trainer"].lease.life for name, it in seen.items()} == {"knows it": 1, "is new": 1}
        assert "roles/trainer/lease.json" in watch.damaged["trainer"]
        time.sleep(0.05)
        assert other.observe(run)["trainer"].silent_for > 0
    HeldLease(run, "trainer", every=60.0).close()
    assert other.observe(run)["trainer"].lease.life == 2
    assert not other.damaged
