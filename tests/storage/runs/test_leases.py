"""Leases: one holder at a time, which hears the desired state of the run."""

import time
from pathlib import Path

import pytest

from benchmarks.harness.faulty_proxy import faulty
from benchmarks.harness.servers import Server
from storage import layout
from storage.runs.control import change_state
from storage.runs.held_lease import HeldLease
from storage.runs.lease_watch import LeaseWatch
from storage.runs.leases import SUPERVISOR, read_lease, read_leases
from storage.runs.run import Run
from tba.errors import Stopped, Superseded
from tests.conftest import s3_root
from tests.support.storage.held_leases import EVERY, check_until, counter
from tests.support.waiting import until

local = pytest.mark.parametrize("root", ["local"], indirect=True)


def test_a_held_lease_moves_and_tells(run: Run):
    assert read_lease(run, "trainer") is None
    with HeldLease(run, "trainer", every=EVERY) as held:
        assert (held.role, held.life) == ("trainer", 1)
        held.tell("learning", step=7)
        until(lambda: counter(run, "trainer") >= 3)
        held.check()
        lease = read_lease(run, "trainer")
        assert lease is not None
        assert (lease.status, lease.progress, lease.life, lease.supervised) == ("learning", {"step": 7}, 1, False)
    lease = read_lease(run, "trainer")
    assert lease is not None
    assert lease.status == "stopped"


def test_taking_over_supersedes_the_life_before(run: Run):
    with HeldLease(run, "trainer", every=EVERY) as old, HeldLease(run, "trainer", every=EVERY) as new:
        assert (old.life, new.life) == (1, 2)
        check_until(old, Superseded, "trainer")
        new.tell("learning")
        until(lambda: (lease := read_lease(run, "trainer")) is not None and lease.status == "learning")
        new.check()
        old.close("failed")
        lease = read_lease(run, "trainer")
        assert lease is not None
        assert (lease.life, lease.status) == (2, "learning")


@local
def test_many_lives_at_once_leave_one_holder(run: Run):
    lives = [HeldLease(run, "searcher-000", every=EVERY) for _ in range(6)]
    assert [held.life for held in lives] == [1, 2, 3, 4, 5, 6]
    for held in lives[:-1]:
        check_until(held, Superseded, "searcher-000")
    lives[-1].check()
    for held in lives:
        held.close()


def test_a_run_that_is_to_stop_stops_its_roles(run: Run):
    with HeldLease(run, "searcher-001", every=EVERY) as held:
        held.check()
        change_state(run, desired="stop", why="enough")
        check_until(held, Stopped, "enough")
        before = counter(run, "searcher-001")
        until(lambda: counter(run, "searcher-001") > before)  # still renewed while the role cleans up


def test_a_state_that_is_gone_wants_nothing_else_than_before(run: Run):
    change_state(run, searchers=3)
    with HeldLease(run, "searcher-002", every=EVERY, index=2) as stays:
        run.store.delete(layout.STATE)
        before = counter(run, "searcher-002")
        until(lambda: counter(run, "searcher-002") > before + 3)
        stays.check()
        change_state(run, searchers=2)
        check_until(stays, Stopped, "searcher-002 is not wanted any more")


def test_a_searcher_that_is_one_too_many_stops_by_itself_and_no_other(run: Run):
    change_state(run, searchers=3)
    with (
        HeldLease(run, "searcher-001", every=EVERY, index=1) as stays,
        HeldLease(run, "searcher-002", every=EVERY, index=2) as leaves,
        HeldLease(run, "trainer", every=EVERY) as trainer,
    ):
        leaves.check()
        change_state(run, searchers=2)
        check_until(leaves, Stopped, "searcher-002 is not wanted any more")
        for held in (stays, trainer):
            before = counter(run, held.role)
            until(lambda held=held, before=before: counter(run, held.role) > before + 1)
            held.check()


@local
def test_a_role_that_starts_when_the_run_is_to_stop_hears_it_at_once(run: Run):
    change_state(run, desired="stop")
    with HeldLease(run, "trainer", every=60.0) as held, pytest.raises(Stopped):
        held.check()


@local
def test_a_signal_stops_like_a_wish(run: Run):
    with HeldLease(run, "trainer", every=60.0) as held:
        held.stop("SIGTERM")
        with pytest.raises(Stopped, match="SIGTERM"):
            held.check()


def test_an_orphan_stops_by_itself(run: Run):
    with HeldLease(run, "trainer", every=EVERY, orphan_after=0.3) as held:
        lease = read_lease(run, "trainer")
        assert lease is not None
        assert lease.supervised
        check_until(held, Stopped, "no supervisor")


@local
def test_a_supervised_role_goes_on_until_its_supervisor_falls_silent(run: Run):
    supervisor = HeldLease(run, SUPERVISOR, every=EVERY)
    with HeldLease(run, "trainer", every=EVERY, orphan_after=2.0) as held:
        ends = time.monotonic() + 2.5
        while time.monotonic() < ends:
            held.check()
            time.sleep(0.05)
        supervisor.close()
        check_until(held, Stopped, "no supervisor")


@local
def test_a_role_that_leaves_with_an_error_says_so(run: Run):
    with pytest.raises(ValueError, match="oops"), HeldLease(run, "trainer", every=EVERY):
        raise ValueError("oops")
    with pytest.raises(Stopped), HeldLease(run, "evaluator", every=EVERY):
        raise Stopped("asked")
    assert {lease.role: lease.status for lease in read_leases(run)} == {"trainer": "failed", "evaluator": "stopped"}


@local
def test_the_last_word_is_the_first_one_said_when_closing(run: Run):
    with HeldLease(run, "trainer", every=EVERY) as held:
        held.tell("learning", step=3)
        held.close("finished")
    lease = read_lease(run, "trainer")
    assert lease is not None
    assert (lease.status, lease.progress) == ("finished", {"step": 3})


def test_trouble_with_the_store_does_not_end_a_role(moto: Server, monkeypatch: pytest.MonkeyPatch):
    with faulty(moto) as (proxy, server):
        root = s3_root(server, monkeypatch)
        config = {"limits": {"store_deadline": 2.0}}
        run = Run.create(root, "first", config=config, sampler_sql="", code_version="test")
        with HeldLease(run, "trainer", every=EVERY, orphan_after=60.0) as held:
            asked = proxy.seen
            proxy.plan = ["busy"] * 7
            until(lambda: proxy.seen > asked + 7)
            held.check()
            before = counter(run, "trainer")
            until(lambda: counter(run, "trainer") > before)


@local
def test_trouble_while_closing_is_not_raised(run: Run):
    held = HeldLease(run, "trainer", every=60.0)
    roles = Path(run.url) / "roles"
    roles.rename(Path(run.url) / "gone")
    roles.write_text("a file where the folder should be")
    held.close()


@local
def test_what_was_not_finite_when_a_role_told_it_is_left_out(run: Run):
    with HeldLease(run, "trainer", every=60.0) as held:
        held.tell("learning", step=3, loss=float("nan"))
        held.close()
    lease = read_lease(run, "trainer")
    assert lease is not None and lease.progress == {"step": 3}


@local
def test_a_lease_tells_the_longest_time_between_two_looks_but_not_before_the_first(run: Run, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def told() -> float:
        held.close()
        lease = read_lease(run, "trainer")
        assert lease is not None
        return lease.hears_every

    for gaps, longest in (((), 0), ((0,), 0), ((300, 2, 40, 5), 40), ((0, 40, 601, 3), 601), ((0, 40, 300, 301), 301)):
        held = HeldLease(run, "trainer", every=60.0)
        for gap in gaps:
            now[0] += gap
            held.check()
        assert told() == longest
    held = HeldLease(run, "trainer", every=60.0)
    for gap in (0, 40, *[3] * 201):
        now[0] += gap
        held.check()
    assert told() == 3, "what was ten minutes ago counts no more"


def test_a_watcher_counts_silence_on_its_own_clock(run: Run):
    watch = LeaseWatch()
    assert watch.observe(run) == {}
    living, dead = HeldLease(run, "living", every=EVERY), HeldLease(run, "dead", every=EVERY)
    dead.close("failed")
    watch.observe(run)
    time.sleep(0.5)
    before = counter(run, "living")
    until(lambda: counter(run, "living") > before)
    seen = watch.observe(run)
    assert seen["dead"].silent_for >= 0.5
    assert seen["living"].silent_for < seen["dead"].silent_for
    assert seen["dead"].lease.status == "failed"
    living.close()
