"""A run as tables: the promises of the views, and the limits of queries."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import storage
from storage import layout
from storage.log.compactions import is_record
from storage.log.schema import encode
from storage.log.trajectories import Trajectories
from storage.maintenance.check import check
from storage.maintenance.compactor import compact
from storage.objects import parquet
from storage.objects.store import Entry, Store
from storage.queries import mirror, views
from storage.queries.tables import METRICS
from storage.runs.events import Events
from storage.runs.run import Run
from storage.weights.evaluations import Evaluations
from storage.weights.versions import Versions
from tba.errors import Missing
from tba.types import Score, Version
from tests.support.builders import make_example, make_shard
from tests.support.faults.rewriting import with_digest
from tests.support.sampled_parameters import sampled
from tests.support.storage.stored_objects import path_of
from tests.support.storage.synthetic import (
    EVERY,
    PROMPTS,
    STEPS,
    STRANGERS,
    B,
    K,
    S,
    copy_run,
    fill,
    make_live_run,
    make_run,
    prune_version,
    put,
)
from tests.support.storage.view_names import MACROS, VIEWS


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


@pytest.fixture
def con(finished: Run) -> duckdb.DuckDBPyConnection:
    return storage.connect(finished)


def rows(con: duckdb.DuckDBPyConnection, query: str) -> list:
    return con.execute(query).fetchall()


def columns(con: duckdb.DuckDBPyConnection, view: str) -> list[str]:
    return [row[0] for row in rows(con, f"describe from {view}")]


# --- what the views say -----------------------------------------------------------------------------------------------


def test_every_view_is_listed_and_nothing_else(con: duckdb.DuckDBPyConnection):
    assert tuple(name for (name,) in rows(con, "show tables")) == VIEWS


def test_every_macro_is_listed_and_nothing_else(con: duckdb.DuckDBPyConnection):
    offered = rows(con, "select name from help() where type = 'macro' order by name")
    assert [name.partition("(")[0] for (name,) in offered] == [macro.partition("(")[0] for macro in MACROS]


def test_a_run_without_anything_has_the_same_views_and_columns(tmp_path: Path, con: duckdb.DuckDBPyConnection):
    empty = storage.connect(Run.create(str(tmp_path), "empty", config={}, sampler_sql="", code_version=""))
    for view in VIEWS:
        assert columns(empty, view) == columns(con, view)
        assert rows(empty, f"from {view}") == []
    for macro in MACROS:
        assert columns(empty, macro) == columns(con, macro)
        assert rows(empty, f"from {macro}") == [] or macro == "help()"


def test_every_column_can_be_named_without_quotes(con: duckdb.DuckDBPyConnection):
    for view in (*VIEWS, *MACROS):
        rows(con, f"select {', '.join(columns(con, view))} from {view}")


def test_a_setting_is_found_by_its_dotted_name(finished: Run, con: duckdb.DuckDBPyConnection):
    found = dict(rows(con, "select name, value from settings"))
    assert json.loads(found["sync.every"]) == EVERY
    assert json.loads(found["task.name"]) == finished.config["task"]["name"]


def test_a_trajectory_knows_when_it_entered_and_how_old_its_version_was(con: duckdb.DuckDBPyConnection):
    found = rows(con, "select distinct sync, step, version_start, version_step, age from trajectories order by 1, 3")
    assert found[0] == (0, 0, 0, 0, 0)
    assert all(step == sync * EVERY for sync, step, *_ in found if sync is not None)
    assert all(version_step == version * EVERY for _, _, version, version_step, _ in found)
    assert all(age == step - version_step for _, step, _, version_step, age in found if step is not None)


def test_a_trajectory_that_waits_has_not_entered(con: duckdb.DuckDBPyConnection):
    waiting = rows(con, "select count(*), max(step), max(age) from trajectories where sync is null")
    assert waiting == [(2 * 2 * S, None, None)]
    assert rows(con, "select distinct sync, step from shards where state = 'waiting'") == [(None, None)]


def test_the_rows_of_shards_are_those_of_their_objects(finished: Run, con: duckdb.DuckDBPyConnection):
    for key, size, digest, count in rows(
        con, "select key, bytes, sha256, rows from shards where state = 'admitted' order by key"
    ):
        data = finished.store.read(key)
        assert (len(data), hashlib.sha256(data).hexdigest()) == (size, digest)
        searcher, seq = layout.parse_shard(key) or (-1, -1)
        assert rows(con, f"select count(*) from trajectories where searcher = {searcher} and seq = {seq}") == [(count,)]


def test_trajectories_are_read_as_they_were_written(finished: Run, con: duckdb.DuckDBPyConnection):
    table = pq.read_table(finished.store.local_path(layout.shard(1, 2)))
    stored = con.sql("from trajectories where searcher = 1 and seq = 2 order by prompt_id, slot").to_arrow_table()
    for name in table.column_names:
        if name != "created_at":  # without its time zone
            assert stored[name].to_pylist() == table[name].to_pylist()


def test_columns_that_a_task_adds_are_kept(whole: Run):
    table = pq.read_table(path_of(whole, layout.shard(0, 6)))
    path_of(whole, layout.shard(0, 6)).write_bytes(
        encode(table.append_column("difficulty", pa.array(range(len(table)), pa.int32())))
    )
    con = storage.connect(whole)
    assert rows(con, "select seq, count(difficulty) from trajectories group by 1 having count(difficulty) > 0") == [
        (6, len(table))
    ]
    assert rows(con, "from help('trajectories') where name = 'difficulty'") == [("difficulty", "integer", "")]


def test_a_column_that_a_task_adds_under_a_name_of_the_view_or_in_two_kinds_is_left_out(whole: Run):
    for searcher, level in ((0, "high"), (1, 3)):
        table = pq.read_table(path_of(whole, layout.shard(searcher, 6)))
        for name, value in (("age", 99), ("Reward", 99.0), ("SEQ", 99), ("level", level), ("kept", 1)):
            table = table.append_column(name, pa.array([value] * len(table)))
        path_of(whole, layout.shard(searcher, 6)).write_bytes(encode(table))
    con = storage.connect(whole)
    assert rows(con, "select max(age) < 99, max(reward), max(seq), sum(kept) from trajectories") == [
        (True, 1.0, 6, 4 * S)
    ]
    assert "level" not in columns(con, "trajectories")


def test_a_group_is_what_one_prompt_got_in_one_round(con: duckdb.DuckDBPyConnection):
    assert rows(con, "select distinct responses, distinct_responses from groups") == [(S, S)]
    assert rows(con, "select sum(reward_mean * responses) from groups") == rows(
        con, "select sum(reward) from trajectories"
    )


def test_prompts_know_their_split(con: duckdb.DuckDBPyConnection):
    assert rows(con, "select split, count(*) from prompts group by 1 order by 1") == [
        ("test", 1),
        ("train", len(PROMPTS)),
    ]


def test_steps_and_draws_follow_the_chain_of_attempts(con: duckdb.DuckDBPyConnection):
    assert rows(con, "select step, attempt from steps order by step") == [
        (step, 1 if step <= 4 else 2) for step in range(1, STEPS + 1)
    ]
    assert rows(con, "select step, count(*) from draws group by 1 order by 1") == [
        (step, B * K) for step in range(1, STEPS + 1)
    ]


def test_abandoned_attempts_show_in_the_views_of_all(con: duckdb.DuckDBPyConnection):
    abandoned = "select distinct step, sync, attempt from {} where abandoned order by step"
    assert rows(con, abandoned.format("steps_all")) == [(5, 3, 1), (6, 3, 1)]
    assert rows(con, abandoned.format("draws_all")) == [(5, 3, 1), (6, 3, 1)]
    assert rows(con, "select version, attempt from versions where abandoned") == [(3, 1)]


def test_steps_taken_again_draw_the_same_trajectories(con: duckdb.DuckDBPyConnection):
    drawn = (
        "select step, slot, position, trajectory_id from draws_all where step in (5, 6) and attempt = {} order by all"
    )
    assert rows(con, drawn.format(1)) == rows(con, drawn.format(2)) != []


def test_every_draw_joins_to_a_trajectory_that_had_entered(con: duckdb.DuckDBPyConnection):
    joined = rows(
        con,
        """
        select count(*), count(t.trajectory_id), count(*) filter (t.step < d.step),
            count(*) filter (d.prompt_id = t.prompt_id)
        from draws d left join trajectories t using (trajectory_id)
        """,
    )
    assert joined == [(STEPS * B * K,) * 4]


def test_steps_always_have_the_documented_metrics(con: duckdb.DuckDBPyConnection):
    assert set(METRICS) <= set(columns(con, "steps"))
    assert rows(con, "select count(loss), count(seconds_sync) from steps") == [(STEPS, 0)]


def test_evaluations_are_one_row_per_metric(con: duckdb.DuckDBPyConnection):
    greedy = "select version, attempt, step, value from evaluations where metric = 'greedy' order by version"
    assert rows(con, greedy) == [(0, 1, 0, 0.25), (2, 1, 4, 0.5), (4, 2, 8, 0.75)]


def test_examples_are_what_each_version_responded(con: duckdb.DuckDBPyConnection):
    found = "select version, attempt, step, prompt_id, prompt, response, answer, reward, abandoned from examples"
    example = ("test/0", "1+2=", "3", "3")
    assert rows(con, f"{found} order by version") == [
        (0, 1, 0, *example, 0.25, False), (2, 1, 4, *example, 0.5, False), (4, 2, 8, *example, 0.75, False),
    ]  # fmt: skip
    joined = "select count(*) from examples join prompts using (prompt_id) where split = 'test' and prompt = text"
    assert rows(con, joined) == [(3,)]


def test_the_examples_of_a_version_that_was_given_up_by_a_later_attempt_are_abandoned(whole: Run):
    Evaluations(whole).write(
        [Score(version=Version(3, 1), step=6, metric="greedy", value=0.5, n=1, seconds=0.0)],
        [make_example(Version(3, 1), step=6)],
    )
    found = rows(storage.connect(whole), "select version, attempt from examples where abandoned")
    assert found == [(3, 1)]


def test_a_version_that_was_given_up_is_still_listed(whole: Run):
    prune_version(whole, Version(1, 1))
    found = rows(storage.connect(whole), "select version, attempt, step, state from versions order by attempt, version")
    assert found == [
        (0, 1, 0, "kept"), (1, 1, 2, "removed"), (2, 1, 4, "kept"), (3, 1, 6, "kept"),
        (2, 2, 4, "kept"), (3, 2, 6, "kept"), (4, 2, 8, "kept"),
    ]  # fmt: skip


def test_a_version_shows_the_share_of_its_weights_that_its_manifest_says(whole: Run, tmp_path: Path):
    fill(str(tmp_path), "weights")
    Versions(whole).publish(Version(5, 2), step=10, folder=tmp_path, weights_sha256="", changed_share=0.125)
    found = rows(storage.connect(whole), "select version, changed_share from versions where version >= 4 order by 1")
    assert found == [(4, None), (5, 0.125)]


def test_a_version_shows_what_is_stored_of_it(whole: Run):
    found = rows(
        storage.connect(whole),
        "select version, attempt, base, 2 * stored_bytes < bytes, stored_bytes <= bytes from versions "
        "where version >= 2 order by attempt, version",
    )
    assert found == [
        (2, 1, None, False, True), (3, 1, None, False, True),
        (2, 2, None, False, True), (3, 2, 2, True, True), (4, 2, 2, True, True),
    ]  # fmt: skip


def test_events_carry_their_data_as_json(tmp_path: Path):
    run = Run.create(str(tmp_path), "first", config={}, sampler_sql="", code_version="")
    Events(run, "trainer", 1).write("shard-refused", "it is torn", severity="warning", key="a/b", rows=3)
    con = storage.connect(run)
    assert rows(con, "select role, kind, severity, data->>'key', (data->'rows')::int from events") == [
        ("trainer", "shard-refused", "warning", "a/b", 3)
    ]


def test_times_are_utc_and_can_be_compared_with_now(con: duckdb.DuckDBPyConnection):
    assert rows(con, "select count(*) > 0 from steps where created_at between now() - interval 1 day and now()") == [
        (True,)
    ]
    assert rows(con, "select min(created_at)::varchar from trajectories") == [("2026-01-02 12:00:00.345678",)]


def test_a_query_for_some_syncs_opens_only_their_shards(whole: Run):
    con = storage.connect(whole)
    torn = whole.store.local_path(layout.shard(0, 0))
    assert torn is not None
    torn.write_bytes(b"torn")
    assert rows(con, "select count(*) from trajectories where sync = 2") == [(2 * 2 * S,)]
    with pytest.raises(duckdb.Error):
        rows(con, "select sum(reward) from trajectories where sync = 0")


# --- runs that are live, or not whole ---------------------------------------------------------------------------------


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


# --- where a run may be -----------------------------------------------------------------------------------------------


def test_a_run_is_found_by_name_by_path_and_by_url(first_half: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TBA_ROOT", first_half.root)
    for name in ("live", first_half.url, f"file://{first_half.url}"):
        assert rows(storage.connect(name), "select max(sync) from syncs") == [(3,)]
    with pytest.raises(Missing, match="nowhere"):
        storage.connect("nowhere")


def test_the_same_answers_come_from_every_store(root: str):
    con = storage.connect(make_run(root))
    assert rows(con, "select count(*), sum(reward) > 0 from trajectories") == [(7 * 2 * 2 * S, True)]
    assert rows(con, "select count(*) from draws_all") == [((STEPS + 2) * B * K,)]
    assert rows(con, "select max(version) from versions where state = 'kept'") == [(4,)]


@pytest.mark.parametrize("root", ["moto"], indirect=True)
def test_of_a_remote_run_only_what_is_new_is_copied_and_no_weights(root: str, cache: Path):
    run = make_live_run(root, "lean")
    copied: list[tuple[int, int]] = []
    storage.connect(run, progress=lambda done, total: copied.append((done, total)))
    assert copied[-1][0] == copied[-1][1] > 10
    names = {path.name for path in cache.rglob("*") if "lean-" in str(path)}
    assert any(name.startswith("MANIFEST.json") for name in names)
    assert not any("safetensors" in name for name in names)

    Trajectories(run).append(0, 99, make_shard({PROMPTS[0]: [1.0]}, round=99))
    copied.clear()
    con = storage.connect(run, progress=lambda done, total: copied.append((done, total)))
    assert copied == [(1, 1)]
    assert rows(con, "select count(*) from trajectories where seq = 99") == [(1,)]


@pytest.mark.parametrize("root", ["moto"], indirect=True)
def test_a_copy_that_has_changed_is_made_anew(root: str, cache: Path):
    run = make_live_run(root, "rotten")
    truth = {path: path.read_bytes() for path in copies_of(cache, run, connect=True)}
    record, steps, prompts = (
        next(path for path in truth if name in str(path))
        for name in (layout.sync(1), layout.steps(1, 1), layout.prompts("train"))
    )
    record.write_bytes(truth[record].replace(b'"step": 2', b'"step": 7'))  # of the same size
    steps.write_bytes(truth[steps][:-1] + b"x")
    prompts.write_bytes(b"short")
    assert rows(storage.connect(run), "select step from syncs where sync = 1") == [(2,)]
    assert {path: path.read_bytes() for path in copies_of(cache, run)} == truth


@pytest.mark.parametrize("root", ["moto"], indirect=True)
def test_copies_of_runs_that_nobody_asks_for_are_forgotten(root: str, cache: Path):
    runs = [Run.create(root, name, config={}, sampler_sql="", code_version="") for name in ("old", "newer", "newest")]
    for run, days in zip(runs, (31, 29, 0), strict=True):
        Events(run, "trainer", 1).write("started", "hello")
        [copy] = copies_of(cache, run, connect=True)
        then = time.time() - days * 24 * 3600
        os.utime(next(path for path in copy.parents if path.parent.name == "runs"), (then, then))
    nobodys = cache / "runs" / "photos-2019"
    nobodys.mkdir()
    os.utime(nobodys, (0, 0))
    storage.connect(runs[2])
    assert nobodys.exists()
    assert [len(copies_of(cache, run)) for run in runs] == [0, 1, 1]


class Behind:
    """A store whose listings still show deleted objects."""

    def __init__(self, store: Store):
        self.store, self.gone = store, set[Entry]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def delete(self, key: str) -> None:
        self.gone |= {entry for entry in self.store.list(key) if entry.key == key}
        self.store.delete(key)

    def list(self, prefix: str = "", *, after: str = "") -> list[Entry]:
        shown = (entry for entry in self.gone if entry.key.startswith(prefix) and entry.key > after)
        return sorted({*self.store.list(prefix, after=after), *shown})


@pytest.mark.parametrize(
    ("root", "what"),
    sampled(
        [("moto", "shard"), ("moto", "object"), ("moto", "record"), ("local", "record")],
        kept=[("local", "record")],
    ),
    indirect=["root"],
)
def test_what_a_listing_shows_for_ever_although_it_is_gone_is_missing(
    root: str, what: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(mirror, "PAUSES", (0.0, 0.01))
    run = make_run(root, f"behind-{what}")
    store = Behind(run.store)
    lost = layout.shard(0, 0)
    if what != "shard":
        compact(run, keep_checkpoints=1)
        [lost] = [it.key for it in store.list(layout.COMPACTIONS) if is_record(it.key) == (what == "record")]
    store.delete(lost)
    con = storage.connect(replace(run, store=cast(Store, store)))
    missing = rows(con, "select key from shards where state = 'missing' order by key")
    admitted = rows(con, "select key from shards where sync is not null order by key")
    assert missing == ([(lost,)] if what == "shard" else admitted)
    assert len(rows(con, "select trajectory_id from trajectories")) == 2 * S * (13 if what == "shard" else 2)


@pytest.mark.long
@pytest.mark.parametrize("root", ["moto"], indirect=True)
def test_copies_of_rows_that_were_compacted_are_forgotten_after_an_hour(root: str, cache: Path):
    run = make_run(root, "twice")
    made = {*copies_of(cache, run, connect=True)}
    for keep in (2, 1):
        compact(run, keep_checkpoints=keep)
        made |= {*copies_of(cache, run, connect=True)}
    assert {*copies_of(cache, run)} == made  # another process may be about to open them
    for copy in made:
        os.utime(copy, (time.time() - 3700, time.time() - 3700))
    con = storage.connect(run)
    kinds = (layout.TRAJECTORIES, layout.COMPACTIONS)
    kept = [path for path in copies_of(cache, run) if any(f"/{kind}" in str(path) for kind in kinds)]
    assert len(kept) == sum(len(run.store.list(kind)) for kind in kinds) == 4
    assert len(made) - len(copies_of(cache, run)) == 12 + 2
    assert len(rows(con, "select response_tokens from trajectories")) == 14 * 2 * S


def copies_of(cache: Path, run: Run, *, connect: bool = False) -> list[Path]:
    if connect:
        storage.connect(run)
    return [path for path in cache.glob(f"runs/{run.name}-*/**/*") if path.is_file()]


@pytest.mark.parametrize("root", ["moto"], indirect=True)
def test_a_new_run_under_an_old_name_is_not_mixed_with_copies_of_the_old_one(root: str):
    for message in ("old", "new"):  # of the same size, under the same name
        run = Run.create(root, "again", config={}, sampler_sql="", code_version="")
        Events(run, "trainer", 1).write("started", message)
        assert rows(storage.connect(run), "select message from events") == [(message,)]
        for entry in run.store.list():
            run.store.delete(entry.key)


# --- what a query cannot do -------------------------------------------------------------------------------------------

HOSTILE = (
    "copy (select 1) to '{here}/out.csv'",
    "copy trajectories to '{run}/trajectories/searcher=000/seq=00000000.parquet' (format parquet)",
    "copy (select 1) to '/dev/stdout'",
    "export database '{here}/exported'",
    "import database '{here}'",
    "attach '{here}/other.db'",
    "install httpfs",
    "force install httpfs from 'http://localhost'",
    "load httpfs",
    "load '{here}/extension.duckdb_extension'",
    "select * from read_csv('/etc/passwd')",
    "select * from '/etc/passwd'",
    "select * from '{here}/secret.csv'",
    "select * from read_text('{here}/secret.csv')",
    "select * from read_blob('{here}/secret.csv')",
    "select * from read_json('{run}/run.json')",
    "select * from read_parquet('{run}/prompts/train.parquet')",
    "select * from parquet_metadata('{run}/prompts/train.parquet')",
    "select * from sniff_csv('{here}/secret.csv')",
    "select * from glob('/etc/*')",
    "select * from query('select * from read_text(''/etc/passwd'')')",
    "create table t (a int); copy t from '{here}/secret.csv'",
    "set enable_external_access = true",
    "reset enable_external_access",
    "pragma enable_external_access = true",
    "set lock_configuration = false",
    "set allowed_directories = ['/']",
    "set temp_directory = '{here}'",
    "set python_enable_replacements = true",
    "set log_query_path = '{here}/queries.log'",
    "pragma profiling_output = '{here}/profile.json'",
    "call enable_profiling(save_location = '{here}/profile.json')",
    "create persistent secret s (type s3)",
    "select getenv('HOME')",
    "select * from secret",
    "copy (select 1) to 's3://bucket/out.parquet'",
    "copy (select 1) to 'http://localhost:1/out.csv'",
    "copy (select 1) to program 'touch {here}/made'",
    "copy (select 1 as a) to '{here}/parts' (format parquet, partition_by (a))",
    "explain analyze copy (select 1) to '{here}/out.csv'",
    "attach '{here}/other.db' (type sqlite)",
    "attach 'ducklake:{here}/lake'",
    "attach 's3://bucket/other.db'",
    "select * from 's3://bucket/x.parquet'",
    "select * from 'http://localhost:1/x.csv'",
    "select * from read_csv('/dev/stdin')",
    "select * from read_text('/dev/fd/0')",
    "select * from read_text('/proc/self/environ')",
    "select * from read_csv(['{here}/secret.csv'])",
    "select * from read_ndjson('{here}/secret.csv')",
    "select * from read_duckdb('{here}/other.db')",
    "select * from parquet_schema('{run}/prompts/train.parquet')",
    "select * from parquet_kv_metadata('{run}/prompts/train.parquet')",
    "select * from query_table('{here}/secret.csv')",
    "select * from json_execute_serialized_sql(json_serialize_sql('from read_text(''/etc/passwd'')'))",
    "prepare p as from read_text('/etc/passwd')",
    "create view stolen as from read_text('/etc/passwd')",
    "create macro stolen() as table from read_text('/etc/passwd'); from stolen()",
    "create table t (a text); insert into t select content from read_text('/etc/passwd')",
    "create secret s (type s3, key_id 'a', secret 'b')",
    "install httpfs from community",
    "update extensions",
    "set global lock_configuration = false",
    "reset lock_configuration",
    "pragma lock_configuration = false",
    "set disabled_filesystems = ''",
    "reset disabled_filesystems",
    "set allowed_paths = ['/etc/passwd']",
    "set secret_directory = '{here}'",
    "set extension_directory = '{here}'",
    "set home_directory = '{here}'",
    "set allow_unsigned_extensions = true",
    "set custom_extension_repository = 'http://localhost:1'",
    "set enable_profiling = 'json'",
    "set profiling_output = '{here}/profile.json'",
    "set logging_storage = 'file'",
    "set memory_limit = '100TB'",
    "pragma max_memory = '100TB'",
    "set threads = 1000",
    "set python_scan_all_frames = true",
    "select * from pandas_scan(null)",
    "select * from arrow_scan(null, null, null)",
)


@pytest.mark.parametrize("query", sampled(HOSTILE, kept=HOSTILE[::4]))
def test_a_query_reads_and_writes_no_file(query: str, finished: Run, con: duckdb.DuckDBPyConnection, tmp_path: Path):
    (tmp_path / "secret.csv").write_text("a,b\n1,2\n")
    before, run = fingerprint(tmp_path), fingerprint(Path(finished.url))
    secret = pa.table({"a": [1]})  # local, because DuckDB finds only Python variables of the calling frame
    if query == "select * from secret":
        assert duckdb.connect().execute(query).fetchall() == [(1,)]
    with pytest.raises(duckdb.Error):
        for statement in query.split(";"):
            con.execute(statement.format(here=tmp_path, run=finished.url)).fetchall()
    assert len(secret) == 1
    assert fingerprint(tmp_path) == before
    assert fingerprint(Path(finished.url)) == run


HARMLESS = (
    "attach ':memory:' as other; create table other.t as select 1; use other; detach memory",
    "checkpoint", "force checkpoint", "vacuum", "pragma enable_checkpoint_on_shutdown",
    "call enable_logging(); select write_log('x'); call disable_logging()",
    "call enable_logging(storage := 'stdout')",
    "pragma enable_profiling; select 1", "call enable_profiling(); select 1",
    "create table steps_mine as from steps; drop view steps; create table steps as select 1 as step",
    "create or replace macro drift() as table select 1; create temp table selection as from selection",
    "drop schema stored cascade", "truncate stored.shards", "alter table stored.steps rename to gone",
    "set variable x = (select count(*) from steps)", "begin; delete from stored.steps; commit",
)  # fmt: skip


def test_what_is_not_refused_leaves_nothing_and_the_process_lives(finished: Run, tmp_path: Path, cache: Path):
    """The queries run in another process, whose standard input has something to read."""
    script = """
import sys
import duckdb, storage
for queries in sys.argv[2:]:
    con = storage.connect(sys.argv[1])
    for query in queries.split(";;"):
        try:
            con.execute(query).fetchall()
        except duckdb.Error:
            pass
    con.close()
print("and lives:", sys.stdin.read(), storage.connect(sys.argv[1]).execute("select count(*) from steps").fetchall())
"""
    run = fingerprint(Path(finished.url))
    refused = ";;".join(HOSTILE).replace("; ", ";;").format(here=tmp_path, run=finished.url)
    queries = [*(query.replace("; ", ";;") for query in HARMLESS), refused]
    arguments = [sys.executable, "-c", script, finished.url, *queries]
    here = {
        **os.environ,
        "PYTHONPATH": str(Path(storage.__file__).parents[1]),
        "HOME": str(tmp_path),
        "TBA_CACHE": str(cache),
    }
    done = subprocess.run(arguments, input="mine", capture_output=True, text=True, timeout=250, cwd=tmp_path, env=here)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"and lives: mine [({STEPS},)]\n")
    assert list(tmp_path.iterdir()) == []
    assert fingerprint(Path(finished.url)) == run


def test_a_query_that_needs_too_much_memory_says_so_and_spills_nothing(
    finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(views, "SHARE_OF_MEMORY", 0.002)
    con = storage.connect(finished)
    with pytest.raises(duckdb.OutOfMemoryException, match="Out of Memory"):
        rows(con, "select count(*) from (select distinct md5(i::varchar) from range(10000000) r(i))")
    assert rows(con, "select count(*) from steps") == [(STEPS,)]
    assert list(tmp_path.iterdir()) == []


def test_a_query_may_take_half_of_the_machines_memory(con: duckdb.DuckDBPyConnection):
    limits = []
    for asked in (duckdb.connect(), con):
        size, unit = rows(asked, "select memory_limit from pragma_database_size()")[0][0].split()
        limits.append(float(size) * 1024.0 ** ["KiB", "MiB", "GiB", "TiB"].index(unit))
    assert limits[1] == pytest.approx(limits[0] / 0.8 * 0.5, rel=0.02)


def test_a_log_to_a_file_is_an_error_and_not_the_end_of_the_process(finished: Run, tmp_path: Path):
    script = """
import sys
import duckdb, storage
con = storage.connect(sys.argv[1])
try:
    con.execute(f"call enable_logging(storage = 'file', storage_path = '{sys.argv[2]}')")
except duckdb.Error:
    print(con.execute("select count(*) > 0 from steps").fetchall())
"""
    arguments = [sys.executable, "-c", script, finished.url, str(tmp_path / "log")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "[(True,)]\n")
    assert list(tmp_path.iterdir()) == []


def test_dropping_a_view_harms_nothing_but_the_connection(finished: Run, con: duckdb.DuckDBPyConnection):
    before = fingerprint(Path(finished.url))
    con.execute("drop view trajectories")
    con.execute("create table mine as select * from steps")
    con.execute("create or replace view steps as select 1 as step")
    assert fingerprint(Path(finished.url)) == before
    assert rows(storage.connect(finished), "select count(*) from steps") == [(STEPS,)]


def test_large_queries_leave_nothing_in_the_working_directory(
    finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    con = storage.connect(finished)
    assert len(rows(con, "select a.trajectory_id from trajectories a, trajectories b order by random()")) > 1000
    assert list(tmp_path.iterdir()) == []


def test_a_cursor_of_the_connection_sees_the_views(con: duckdb.DuckDBPyConnection):
    assert rows(con.cursor(), "select count(*) from steps") == [(STEPS,)]


def fingerprint(folder: Path) -> dict[str, str]:
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def test_reading_a_copy_of_a_run_elsewhere_works(finished: Run, tmp_path: Path):
    shutil.copytree(finished.url, tmp_path / "moved")
    assert rows(storage.connect(str(tmp_path / "moved")), "select count(*) from steps") == [(STEPS,)]
