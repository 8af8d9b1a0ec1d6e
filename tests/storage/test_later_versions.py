"""Data of a later version of the program: additions are ignored, and another schema version is refused with both
numbers. Whole runs with additions are in tests/test_stored_runs.py."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import storage
from flows.planning.run_summary import summaries
from storage import layout
from storage.log.schema import encode, to_table
from storage.runs.events import read_events
from storage.runs.held_lease import HeldLease
from storage.runs.leases import read_lease, read_leases
from storage.runs.run import Run
from tests.support.builders import make_shard
from tests.support.faults.rewriting import rewrite
from tests.support.storage.synthetic import PROMPTS, SyntheticRun, make_live_run, put


@pytest.fixture
def live(tmp_path: Path) -> Run:
    return make_live_run(str(tmp_path / "root"))


def later_shard(run: Run, seq: int) -> bytes:
    """Return a valid shard, except that its schema version is 2."""
    table = to_table(make_shard({PROMPTS[0]: [1.0]}, round=seq), run=run.name, searcher=0, seq=seq)
    return encode(table.replace_schema_metadata({**table.schema.metadata, b"schema_version": b"2"}))


def test_a_shard_of_a_later_schema_version_that_waits_is_not_read(live: Run):
    put(live, layout.shard(0, 50), later_shard(live, 50))
    with storage.connect(live) as con:
        state = con.execute("select state, reason from shards where seq = 50").fetchall()
        assert state == [("unreadable", "has schema version 2, not 1")]
        assert con.execute("select count(*) from trajectories where seq = 50").fetchone() == (0,)


def test_a_shard_of_a_later_schema_version_is_refused_by_a_record_and_an_event_that_say_both(tmp_path: Path):
    made = SyntheticRun(str(tmp_path), "first").begin()
    seq = 1 + max(name[1] for it in made.run.store.list(layout.TRAJECTORIES) if (name := layout.parse_shard(it.key)))
    put(made.run, layout.shard(0, seq), later_shard(made.run, seq))
    made.buffer(1).sync(0, step=0)
    refused = json.loads((Path(made.run.url) / layout.sync(0)).read_text())["refused"]
    said = "its metadata says '2' of 'schema_version', not '1'"
    assert refused == [{"key": layout.shard(0, seq), "reason": said}]
    assert [it["message"] for it in read_events(made.run) if it["kind"] == "shard-refused"] == [
        f"{layout.shard(0, seq)}: {said}"
    ]
    assert pq.read_metadata(Path(made.run.url) / layout.shard(0, seq)).num_rows == 1  # the shard stays as it is


def test_a_run_of_a_later_schema_version_is_listed_beside_the_others(live: Run):
    put(live, "../strange/run.json", json.dumps({"schema_version": 2, "added": 1}).encode())
    assert {it.run: it.state == "unreadable" for it in summaries(live.root)[0]} == {"live": False, "strange": True}


def test_a_lease_with_additions_is_a_lease(live: Run):
    with HeldLease(live, "trainer", every=60.0) as held:
        held.tell("step 3", step=3.0)
    path = Path(live.url) / layout.lease("trainer")
    rewrite(path, added_later={"x": 1})
    (lease,) = read_leases(live)
    assert (lease.role, lease.life, lease.status, lease.progress) == ("trainer", 1, "stopped", {"step": 3.0})
    with HeldLease(live, "trainer", every=60.0) as held:
        assert held.life == 2
        assert read_lease(live, "trainer") is not None
