"""A run as tables: the promises of the views."""

import hashlib
import json
import shutil
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import storage
from storage import layout
from storage.log.schema import encode
from storage.queries.tables import METRICS
from storage.runs.events import Events
from storage.runs.run import Run
from storage.weights.evaluations import Evaluations
from storage.weights.versions import Versions
from tba.types import Score, Version
from tests.support.builders import make_example
from tests.support.storage.stored_objects import path_of
from tests.support.storage.synthetic import EVERY, PROMPTS, STEPS, B, K, S, copy_run, fill, make_run, prune_version
from tests.support.storage.views import MACROS, VIEWS, columns, rows


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a finished run that many tests read and none changes."""
    return make_run(str(tmp_path_factory.mktemp("root")))


@pytest.fixture
def whole(finished: Run, tmp_path: Path) -> Run:
    """Return a copy of a finished run that a test may change."""
    return copy_run(finished, tmp_path)


@pytest.fixture
def con(finished: Run) -> duckdb.DuckDBPyConnection:
    return storage.connect(finished)


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


def test_a_cursor_of_the_connection_sees_the_views(con: duckdb.DuckDBPyConnection):
    assert rows(con.cursor(), "select count(*) from steps") == [(STEPS,)]


def test_reading_a_copy_of_a_run_elsewhere_works(finished: Run, tmp_path: Path):
    shutil.copytree(finished.url, tmp_path / "moved")
    assert rows(storage.connect(str(tmp_path / "moved")), "select count(*) from steps") == [(STEPS,)]
