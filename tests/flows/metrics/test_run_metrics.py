"""The metrics of a run agree with what queries find in its storage, and a second reading reads only what is new."""

from collections.abc import Sequence

import duckdb
import pytest

import storage
from flows.metrics import catalogue, role_metrics
from flows.metrics.run_reader import RunReader
from storage import layout
from storage.objects.store import Entry
from storage.runs.events import EventReader, Events, read_events
from storage.runs.held_lease import HeldLease
from storage.runs.run import Run
from storage.weights.attempt_claim import claim_attempt
from tba.alarms import Alarm, Alarms
from tba.errors import StorageError
from tba.types import Version
from tests.support.storage.synthetic import SyntheticRun, make_live_run, put

local = pytest.mark.parametrize("root", ["local"], indirect=True)
Found = dict[tuple[str, ...], float]


def read(reader: RunReader) -> Found:
    """Return the values of a reading by name and labels."""
    reader.look()
    return {(metric.name, *labels): value for metric, labels, value in reader.read()}


def answer(con: duckdb.DuckDBPyConnection, query: str) -> float:
    return float(con.sql(query).fetchall()[0][0])


def check_log(run: Run, found: Found) -> None:
    con = storage.connect(run)
    expected = {
        "tba_syncs_total": "select count(*) from syncs",
        "tba_admitted_shards_total": "select count(*) from shards where state = 'admitted'",
        "tba_admitted_trajectories_total": "select sum(rows) from syncs",
        "tba_admitted_bytes_total": "select sum(bytes) from shards where state = 'admitted'",
        "tba_refused_shards_total": "select count(*) from shards where state = 'refused'",
        "tba_sync_timestamp_seconds": "select epoch(max(created_at)) from syncs",
        "tba_trainer_steps_total": "select count(*) from steps_all",
        "tba_trainer_tokens_total": "select sum(tokens) from steps_all",
        "tba_trainer_step_seconds_total": "select sum(seconds_step) from steps_all",
        "tba_run_attempts": "select max(attempt) from attempts",
        "tba_evaluations_total": "select count(distinct (version, attempt)) from evaluations",
        "tba_evaluation_seconds_total": "select sum(seconds) from evaluations",
    }
    assert {name: found[name,] for name in expected} == {
        name: pytest.approx(answer(con, query), abs=1e-6) for name, query in expected.items()
    }
    events = con.sql("select kind, severity, count(*) from events group by all").fetchall()
    assert {it[1:]: count for it, count in found.items() if it[0] == "tba_events_total"} == {
        (kind, severity): count for kind, severity, count in events
    }


def test_metrics_agree_with_queries(finished: Run):
    found = read(RunReader(finished))
    check_log(finished, found)
    con = storage.connect(finished)
    last = con.sql("select loss, reward_mean, age_mean from steps order by step desc limit 1").fetchall()[0]
    assert (found["tba_step_loss",], found["tba_step_reward_mean",], found["tba_step_age_mean_steps",]) == last
    assert found["tba_run_step",] == found["tba_run_planned_steps",] == 8
    assert found["tba_evaluation_score", "greedy"] == 0.75
    assert found["tba_run_state", "finished"] == 1
    assert sum(value for name, value in found.items() if name[0] == "tba_run_state") == 1
    kept = answer(con, "select sum(stored_bytes) from versions where state = 'kept'")
    assert found["tba_stored_bytes", "versions"] > kept > 0  # the manifests come on top


def test_leases_tell_of_living_roles(live: Run):
    found = read(RunReader(live))
    assert found["tba_run_state", "running"] == 1
    assert found["tba_roles", "searcher", "alive"] == 2
    assert found["tba_role_up", "searcher", "1"] == found["tba_role_up", "trainer", "0"] == 1
    assert 0 <= found["tba_role_lease_age_seconds", "trainer", "0"] < 600
    assert found["tba_searcher_tokens_total", "0"] + found["tba_searcher_tokens_total", "1"] == 90
    assert found["tba_searcher_seconds_total", "0", "generate"] == 3
    assert (found["tba_run_step",], found["tba_step_loss",], found["tba_run_version",]) == (5, 0.125, 2)
    assert (found["tba_alarms", "disk-filling"], found["tba_alarms", "role-late"]) == (1, 0)


def test_shards_that_no_record_names_wait(live: Run):
    named = storage.connect(live).sql("select searcher, 1 + max(seq) from shards where sync is not null group by all")
    waiting = {0: 5, 1: 4}
    expected = sum(max(0, stored - dict(named.fetchall()).get(searcher, 0)) for searcher, stored in waiting.items())
    assert read(RunReader(live))["tba_waiting_shards",] == expected > 0


@local
def test_a_second_reading_reads_only_what_is_new(live: Run, monkeypatch: pytest.MonkeyPatch):
    reader = RunReader(live)
    read(reader)
    asked: list[str] = []
    reading, listing = live.store.read, live.store.list

    def noted(key: str) -> bytes:
        asked.append(key)
        return reading(key)

    def counted(prefix: str = "", *, after: str = "") -> list[Entry]:
        assert prefix  # never everything
        found = listing(prefix, after=after)
        asked.extend(entry.key for entry in found)
        return found

    monkeypatch.setattr(live.store, "read", noted)
    monkeypatch.setattr(live.store, "list", counted)
    read(reader)
    assert not [key for key in asked if key.startswith((layout.TRAJECTORIES, layout.DRAWS, layout.SYNCS))]
    assert len([key for key in asked if key.startswith(layout.STEPS)]) <= 3
    asked.clear()
    made = SyntheticRun.of(live)
    made.search(version=2)
    buffer = made.buffer(1)
    for sync in range(4):
        buffer.sync(sync, step=6 if sync == 3 else 2 * sync)
    buffer.sync(4, step=8)
    found = read(reader)
    assert [key for key in asked if key.startswith(layout.SYNCS)][-1] == layout.sync(4)
    assert found["tba_syncs_total",] == 5


@local
def test_a_new_attempt_that_repeats_steps_is_counted(root: str, monkeypatch: pytest.MonkeyPatch):
    """The ledger of attempt 2 begins before the newest ledger that the reader has read, which is of attempt 1."""
    monkeypatch.setattr("flows.metrics.log_metrics._BEHIND", 0)
    monkeypatch.setattr("flows.metrics.log_metrics.EVENTS_EVERY", 0.0)
    made = SyntheticRun(root, "first").begin()
    made.take_syncs(1, range(1, 5), made.buffer(1))
    reader = RunReader(made.run)
    assert read(reader)["tba_trainer_steps_total",] == 8
    for entry in made.run.store.list(layout.checkpoint(Version(4, 1))):
        made.run.store.delete(entry.key)
    assert claim_attempt(made.run).continues == Version(2, 1)
    made.publish(Version(2, 2))
    buffer = made.buffer(2)
    for sync in range(3):
        buffer.sync(sync, step=2 * sync)
    buffer.restore(made.queues[2])
    made.take_syncs(2, range(3, 5), buffer)
    found = read(reader)
    check_log(made.run, found)
    assert found["tba_trainer_steps_total",] == 12


@local
def test_an_alarm_ends_with_the_life_of_its_role(live: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flows.metrics.log_metrics.EVENTS_EVERY", 0.0)
    reader = RunReader(live)
    assert read(reader)["tba_alarms", "disk-filling"] == 1
    Events(live, "supervisor", 2).write("supervisor-started", "another supervisor")
    assert read(reader)["tba_alarms", "disk-filling"] == 0


@local
@pytest.mark.parametrize("fails_at", [1, 2, 3, 5, 8, 12])
def test_a_reading_that_fails_halfway_counts_nothing_twice(
    finished: Run, monkeypatch: pytest.MonkeyPatch, fails_at: int
):
    """The store fails once, at different objects of the log."""
    monkeypatch.setattr("flows.metrics.log_metrics._AT_ONCE", 1)
    monkeypatch.setattr("storage.runs.events._AT_ONCE", 1)
    reader, asked, reading = RunReader(finished), [0], finished.store.read_many
    reader.look()

    def fail_once(keys: Sequence[str]) -> list[bytes]:
        asked[0] += 1
        if asked[0] == fails_at:
            raise StorageError("no answer")
        return reading(keys)

    monkeypatch.setattr(finished.store, "read_many", fail_once)
    with pytest.raises(StorageError):
        reader.read()
    check_log(finished, read(reader))


@local
def test_events_are_not_lost_if_the_store_fails(live: Run, monkeypatch: pytest.MonkeyPatch):
    for number in range(3):
        Events(live, "trainer", 1).write(f"kind-{number}", "something")
    monkeypatch.setattr("storage.runs.events._AT_ONCE", 1)
    expected, reader, reading = read_events(live), EventReader(live), live.store.read_many
    answers = [True, True, False]

    def fail_once(keys: Sequence[str]) -> list[bytes]:
        if answers and not answers.pop(0):
            raise StorageError("no answer")
        return reading(keys)

    monkeypatch.setattr(live.store, "read_many", fail_once)
    with pytest.raises(StorageError):
        reader.new()
    assert reader.new() == expected
    assert reader.new() == []


@local
def test_an_ended_role_has_no_present(root: str):
    run = make_live_run(root)
    with HeldLease(run, "searcher-000", every=3600.0) as lease:
        lease.tell("working", version=2.0, tokens=4.0)
        lease.renew()
        alarms = Alarms(Events(run, "supervisor", 1).write)
        for _ in range(2):
            alarms.update([Alarm("disk-filling", "1 GB is free", "host", "error")])
        reader = RunReader(run)
        alive = read(reader)
    present = {"tba_searcher_version", "tba_role_lease_age_seconds", "tba_role_quiet_seconds"}
    assert present <= {name for name, *_ in alive}
    assert alive["tba_alarms", "disk-filling"] == 1
    ended = read(reader)
    assert not (present | {"tba_role_free_disk_bytes"}) & {name for name, *_ in ended}
    assert ended["tba_alarms", "disk-filling"] == 0
    assert ended["tba_searcher_tokens_total", "0"] == 4


@local
def test_the_last_reading_has_the_newest_events_and_sizes(root: str):
    run = make_live_run(root)
    reader = RunReader(run)
    with HeldLease(run, "trainer", every=3600.0) as lease:
        lease.tell("working", version=3.0)
        lease.renew()
        assert read(reader)["tba_run_version",] == 3
        SyntheticRun.of(run).publish(Version(3, 1))
        Events(run, "trainer", 1).write("last-words", "the trainer ends")
    last = read(reader)
    assert last["tba_run_version",] == 3
    assert last["tba_events_total", "last-words", "info"] == 1


@local
def test_roles_that_never_started_are_counted(root: str):
    run = make_live_run(root)
    with HeldLease(run, "trainer", every=3600.0):
        found = read(RunReader(run))
    assert found["tba_roles", "trainer", "alive"] == 1
    assert found["tba_roles", "searcher", "alive"] == found["tba_roles", "evaluator", "alive"] == 0


@local
def test_shards_still_wait_while_their_searcher_starts_again(root: str):
    run = make_live_run(root)
    reader = RunReader(run)
    with HeldLease(run, "searcher-000", every=3600.0) as lease:
        lease.tell("working", shards=50.0)
        lease.renew()
        waiting = read(reader)["tba_waiting_shards",]
    with HeldLease(run, "searcher-000", every=3600.0):
        assert read(reader)["tba_waiting_shards",] == waiting > 40


@local
def test_damaged_objects_are_counted_and_left_out(finished: Run):
    whole = read(RunReader(finished))
    put(finished, layout.sync(1), b"{}")
    put(finished, layout.steps(1, 1), b"not parquet")
    found = read(RunReader(finished))
    assert found["tba_run_damaged_objects",] == 2
    assert found["tba_syncs_total",] == whole["tba_syncs_total",] - 1
    assert found["tba_trainer_steps_total",] == whole["tba_trainer_steps_total",] - 2


@local
def test_the_number_of_series_is_bounded(live: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(catalogue, "MOST_VALUES", 3)
    monkeypatch.setattr(role_metrics, "MOST_SEARCHERS", 1)
    for number in range(5):
        Events(live, "trainer", 1).write(f"kind-{number}", "something")
    found = read(RunReader(live))
    kinds = {it: value for it, value in found.items() if it[0] == "tba_events_total"}
    assert len(kinds) == 4
    assert sum(kinds.values()) == answer(storage.connect(live), "select count(*) from events")
    assert [it for it in found if it[0] == "tba_searcher_tokens_total"] == [("tba_searcher_tokens_total", "0")]
    assert found["tba_roles", "searcher", "alive"] == 2
