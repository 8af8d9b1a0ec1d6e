"""Views of runs that are live, or in which objects are torn, missing or foreign."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import storage
from storage import layout
from storage.log.schema import encode
from storage.log.trajectories import Trajectories
from storage.maintenance.check import check
from storage.objects import parquet
from storage.runs.run import Run
from tba.errors import Missing
from tba.types import Version
from tests.support.builders import make_shard
from tests.support.faults.rewriting import with_digest
from tests.support.storage.stored_objects import path_of
from tests.support.storage.synthetic import (
    EVERY,
    PROMPTS,
    STEPS,
    STRANGERS,
    S,
    copy_run,
    make_live_run,
    make_run,
    prune_version,
    put,
)
from tests.support.storage.views import VIEWS, rows


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a finished run that many tests read and none changes."""
    return make_run(str(tmp_path_factory.mktemp("root")))


@pytest.fixture(scope="module")
def first_half(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_live_run(str(tmp_path_factory.mktemp("root")))


@pytest.fixture
def whole(finished: Run, tmp_path: Path) -> Run:
    """Return a copy of a finished run that a test may change."""
    return copy_run(finished, tmp_path)


@pytest.fixture
def live(first_half: Run, tmp_path: Path) -> Run:
    """Return a copy of a live run."""
    return copy_run(first_half, tmp_path)


def test_a_live_run_can_be_asked(first_half: Run):
    con = storage.connect(first_half)
    assert rows(con, "select max(step) from steps") == [(4,)]
    assert rows(con, "select max(sync), max(step) from syncs") == [(3, 6)]
    assert rows(con, "select count(*) from trajectories where sync = 3") == [(2 * 2 * S,)]


def test_a_connection_shows_what_was_stored_when_it_was_made(live: Run):
    before = storage.connect(live)
    count = "select count(*) from trajectories where sync is null"
    assert rows(before, count) == [(0,)]
    Trajectories(live).append(0, 99, make_shard({PROMPTS[0]: [1.0]}, round=99))
    assert rows(before, count) == [(0,)]
    assert rows(storage.connect(live), count) == [(1,)]


def test_a_torn_shard_that_waits_disturbs_no_query(live: Run):
    live.store.create(layout.shard(0, 50), b"PAR1 torn")
    con = storage.connect(live)
    assert rows(con, "select state from shards where seq = 50") == [("unreadable",)]
    assert rows(con, "select count(*) > 0 from trajectories") == [(True,)]


def test_a_refused_shard_says_why_and_is_not_read(live: Run):
    key = layout.shard(0, 50)
    live.store.create(key, b"PAR1 torn")
    last = max(entry.key for entry in live.store.list(layout.SYNCS))
    record = json.loads(live.store.read(last))
    path = live.store.local_path(last)
    assert path is not None
    path.write_bytes(with_digest({**record, "refused": [{"key": key, "reason": "not Parquet"}]}))
    con = storage.connect(live)
    assert rows(con, "select state, reason, sync from shards where seq = 50") == [("refused", "not Parquet", None)]


def test_what_was_refused_for_its_name_is_listed(live: Run):
    key = "trajectories/searcher=000/seq=00000000 (1).parquet"
    put(live, key, b"x")
    last = max(entry.key for entry in live.store.list(layout.SYNCS))
    record = json.loads(live.store.read(last))
    refused = [{"key": key, "reason": "not the name of a shard"}]
    path_of(live, last).write_bytes(with_digest({**record, "refused": refused}))
    con = storage.connect(live)
    assert rows(con, "select key, searcher, seq, reason from shards where state = 'refused'") == [
        (key, None, None, "not the name of a shard")
    ]


def test_an_admitted_shard_that_is_gone_is_listed_as_missing(whole: Run):
    whole.store.delete(layout.shard(0, 1))
    con = storage.connect(whole)
    assert rows(con, "select seq, searcher, rows from shards where state = 'missing'") == [(1, 0, 2 * S)]
    assert rows(con, "select count(*) from trajectories where seq = 1") == [(2 * S,)]


def test_what_is_not_part_of_a_run_disturbs_no_query(whole: Run):
    before = {view: rows(storage.connect(whole), f"select count(*) from {view}") for view in VIEWS}
    for name in STRANGERS:
        put(whole, name, b"x")
    con = storage.connect(whole)
    assert {view: rows(con, f"select count(*) from {view}") for view in VIEWS} == before


LACKING: dict[str, Callable[[dict[str, Any]], Any]] = {
    layout.sync(1): lambda record: record.pop("shards"),
    layout.sync(2): lambda record: record["shards"][0].pop("sha256"),
    layout.sync(3): lambda record: record.update(step="six"),
    layout.sync(4): lambda record: record.update(shards=3),
    layout.attempt(2): lambda record: record.update(continues={"sync": 2}),
    layout.attempt(1): lambda record: record.update(created_at=3),
    layout.evaluation(Version(2, 1)): lambda record: record["scores"][0].pop("n"),
    layout.evaluation(Version(4, 2)): lambda record: record.update(created_at="noon"),
    layout.retention(1): lambda record: record.update(removed=3),
    layout.event("trainer", 2, 0): dict.clear,
    "versions/000002-a0001/MANIFEST.json": lambda record: record.pop("step"),
    "checkpoints/000002-a0001/MANIFEST.json": lambda record: record.update(files=[{"name": "config.json"}]),
}


@pytest.mark.parametrize("key", LACKING)
def test_a_record_that_lacks_what_a_view_needs_is_damage_and_a_problem(whole: Run, key: str):
    if key == layout.retention(1):
        prune_version(whole, Version(1, 1))
    record = json.loads(whole.store.read(key))
    LACKING[key](record)
    path_of(whole, key).write_bytes(with_digest(record))
    assert key in [named for (named,) in rows(storage.connect(whole), "select key from damage")]
    assert any(it.key in (key, key.removesuffix(layout.MANIFEST)) for it in check(whole).problems)


@pytest.mark.parametrize(
    "data", [b"PAR1 torn", parquet.encode(pa.table({"step": [1]})), parquet.encode(pa.table({"abandoned": [True]}))]
)
def test_steps_that_cannot_be_read_are_damage(whole: Run, data: bytes):
    path_of(whole, layout.steps(1, 1)).write_bytes(data)
    con = storage.connect(whole)
    assert rows(con, "select key from damage") == [(layout.steps(1, 1),)]
    assert rows(con, "select min(step), count(*) from steps") == [(EVERY + 1, STEPS - EVERY)]


def test_a_shard_of_another_schema_that_waits_disturbs_no_query(live: Run):
    table = pq.read_table(path_of(live, layout.shard(0, 0)))
    place = table.schema.get_field_index("reward")
    words = table.set_column(place, "reward", pa.array(["high"] * len(table)))
    for seq, odd in enumerate((words, table.append_column("reward", table["reward"])), start=50):
        put(live, layout.shard(0, seq), encode(odd))
    con = storage.connect(live)
    assert rows(con, "select distinct state, reason from shards where seq >= 50") == [
        ("unreadable", "has another schema: see column 'reward'")
    ]
    assert rows(con, "select sum(reward) > 0 from trajectories") == [(True,)]


def test_a_run_is_found_by_name_by_path_and_by_url(first_half: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TBA_ROOT", first_half.root)
    for name in ("live", first_half.url, f"file://{first_half.url}"):
        assert rows(storage.connect(name), "select max(sync) from syncs") == [(3,)]
    with pytest.raises(Missing, match="nowhere"):
        storage.connect("nowhere")
