"""Leases: one holder at a time, which hears the desired state of the run."""

import json
import time
from pathlib import Path

import pytest

from benchmarks.harness.faulty_proxy import faulty
from benchmarks.harness.servers import Server
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
from tests.conftest import s3_root
from tests.support.waiting import until

local = pytest.mark.parametrize("root", ["local"], indirect=True)
EVERY = 0.05


def check_until(lease: HeldLease, error: type[Exception], match: str) -> None:
    """Check until the lease raises this error."""

    def raised() -> bool:
        try:
            lease.check()
        except error as raised:
            assert match in str(raised)
            return True
        return False

    until(raised)


def counter(run: Run, role: str) -> int:
    lease = read_lease(run, role)
    return lease.counter if lease else -1


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
def test_what_was_not_finite_when_a_role_told_it_is_left_out(run: Run):
    with HeldLease(run, "trainer", every=60.0) as held:
        held.tell("learning", step=3, loss=float("nan"))
        held.close()
    lease = read_lease(run, "trainer")
    assert lease is not None and lease.progress == {"step": 3}


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
