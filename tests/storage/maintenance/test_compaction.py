"""A run and its forks give the same answers before and after their shards are compacted, for every reader."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import storage
from storage import layout
from storage.log.compactions import COLUMNS as CONTENT
from storage.log.compactions import Compactions
from storage.log.schema import LATER, encode
from storage.log.sync_records import read_chain
from storage.log.trajectories import Trajectories
from storage.maintenance.check import check
from storage.queries import admitted_shards
from storage.runs.run import Run
from storage.weights.attempt_claim import claim_attempt
from tba.errors import Superseded
from tba.types import Version
from tests.support.builders import make_shard
from tests.support.sampled_parameters import sampled
from tests.support.storage.compacted import compacted, drawn, light, loose, objects, replayed, save_checkpoint, tables
from tests.support.storage.synthetic import EVERY, LAST_SYNC, SyntheticRun, make_run
from tests.support.storage.synthetic_forks import fork, go_on

local = pytest.mark.parametrize("root", ["local"], indirect=True)
on_disk_and_s3 = pytest.mark.parametrize("root", sampled(["local", "moto"], kept=["local"]), indirect=True)

COUNTED = ", ".join(f"count({name})" for name in LATER)


def findings(run: Run) -> tuple[list, dict[str, int]]:
    found = check(run)
    return found.problems, {kind: number for kind, number in found.checked.items() if kind != "compactions"}


# --- the same before and after ----------------------------------------------------------------------------------------


@on_disk_and_s3
def test_whoever_reads_a_compacted_run_finds_what_was_there(root: str):
    run = make_run(root)
    before, checked, lists = tables(run), findings(run), light(run)
    with storage.connect(run) as con:
        [(*later, rows)] = con.execute(f"select {COUNTED}, count(*) from trajectories").fetchall()
        assert all(0 < stored < rows for stored in later)
    draws = drawn(replayed(run), range(9, 30))
    done = compacted(run)
    assert (done.upto, done.shards, done.left) == (Version(4, 2), 12, {})
    admitted = {shard.key for record in read_chain(run) for shard in record.shards}
    assert not admitted & set(loose(run)) and len(loose(run)) == 2  # shards that wait
    assert len(objects(run)) == 1
    assert tables(run) == before
    assert findings(run) == checked
    assert light(run) == lists
    assert drawn(replayed(run), range(9, 30)) == draws


@local
def test_a_round_that_was_compacted_is_neither_taken_again_nor_overwritten(root: str):
    run = make_run(root)
    log = Trajectories(run)
    rewards = {"train/0": [1.0]}
    again = Trajectories(run)
    first = make_shard({"train/0": [0.0, 1.0]}, searcher=5)
    log.append(5, 0, first)
    buffer = replayed(run)
    buffer.sync(LAST_SYNC + 1, step=100)
    unused = [log.next_seq(searcher) for searcher in (0, 1, 5)]
    places = [log.asked(searcher, range(99)) for searcher in (0, 1, 5)]
    save_checkpoint(run, LAST_SYNC + 1, step=100)
    compacted(run)
    assert loose(run) == []
    assert [log.next_seq(searcher) for searcher in (0, 1, 5)] == unused == [7, 7, 1]
    assert [log.asked(searcher, range(99)) for searcher in (0, 1, 5)] == places and len(places[2]) == 2
    assert again.append(5, 0, first) == layout.shard(5, 0)
    with pytest.raises(Superseded, match="another incarnation"):
        again.append(5, 0, make_shard(rewards, searcher=5))
    assert loose(run) == []


@local
def test_what_an_append_asks_for_does_not_grow_with_what_is_compacted(root: str, monkeypatch: pytest.MonkeyPatch):
    run = make_run(root)
    compacted(run)
    log = Trajectories(run)
    first = log.next_seq(0)
    log.append(0, first, make_shard({"train/0": [1.0]}, round=first))
    with monkeypatch.context() as asking:
        asking.setattr(run.store, "list", None)
        for round in range(first + 1, first + 4):
            log.append(0, round, make_shard({"train/0": [1.0]}, round=round))
    replayed(run).sync(LAST_SYNC + 1, step=100)
    save_checkpoint(run, LAST_SYNC + 1, step=100)
    compacted(run)
    assert log.append(0, first + 3, make_shard({"train/0": [1.0]}, round=first + 3))  # as if its answer was lost
    with pytest.raises(Superseded, match="another incarnation"):
        log.append(0, first + 3, make_shard({"train/0": [0.0]}, round=first + 3))
    assert layout.shard(0, first + 3) not in loose(run)


@local
def test_only_what_was_admitted_before_the_oldest_kept_checkpoint_is_compacted(root: str):
    run = make_run(root)
    before = tables(run)
    assert compacted(run, keep=2).upto == Version(2, 1)
    newer = {shard.key for record in read_chain(run) if record.sync > 2 for shard in record.shards}
    assert newer <= set(loose(run))
    [small] = objects(run)
    assert tables(run) == before
    compacted(run)
    assert len(objects(run)) == 1 and small not in objects(run)
    assert tables(run) == before
    assert compacted(run).written == []
    assert check(run).problems == []


@local
def test_a_run_without_a_checkpoint_is_left_alone(root: str):
    made = SyntheticRun(root, "first").begin()
    made.buffer(1).sync(0, step=0)
    stored = {entry.key for entry in made.run.store.list()}
    assert compacted(made.run).upto is None
    assert {entry.key for entry in made.run.store.list()} == stored


@local
def test_an_object_has_few_shards_and_each_row_group_rows_of_one(root: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("storage.maintenance.compactor.SHARDS", 5)
    monkeypatch.setattr("storage.maintenance.compaction_format.ROWS", 4)
    run = make_run(root)
    before = tables(run)
    compacted(run)
    assert len(objects(run)) == 3
    parts = [part for it in Compactions(run).look() for part in it.parts]
    assert [len(part.groups) for part in parts] == [2] * 12
    assert tables(run) == before
    assert compacted(run).written == []
    assert check(run).problems == []


@local
def test_a_query_of_one_sync_reads_only_its_row_groups(root: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("storage.maintenance.compactor.SHARDS", 6)
    run = make_run(root)
    compacted(run)
    first, _ = sorted(objects(run))
    with storage.connect(run) as con:
        Path(run.url, first).write_bytes(b"")
        assert con.execute("select count(*) from trajectories where sync = 4").fetchall() == [(24,)]
        assert con.execute("select count(*) from trajectories where step = 6").fetchall() == [(12,)]
        with pytest.raises(Exception, match="compactions"):
            con.execute("select count(*), sum(reward) from trajectories where sync = 1").fetchall()


@local
def test_columns_of_a_task_are_kept_and_a_shard_that_does_not_fit_stays_as_it_is(root: str):
    run = make_run(root)
    for searcher, name in ((0, "difficulty"), (1, "sync")):
        path = Path(run.url, layout.shard(searcher, 6))
        table = pq.read_table(path)
        path.write_bytes(encode(table.append_column(name, pa.array(range(len(table)), pa.int32()))))
    replayed(run).sync(LAST_SYNC + 1, step=100)
    save_checkpoint(run, LAST_SYNC + 1, step=100)
    before = tables(run)["trajectories"]
    done = compacted(run)
    assert done.left == {layout.shard(1, 6): "it has an added column 'sync', whose name is reserved"}
    assert loose(run) == [layout.shard(1, 6)]
    assert tables(run)["trajectories"] == before
    with storage.connect(run) as con:
        [(number, total)] = con.execute("select count(difficulty), sum(difficulty) from trajectories").fetchall()
        assert (number, total) == (6, 15)
    assert compacted(run).written == []
    assert not [it for it in check(run).problems if it.key.startswith((layout.TRAJECTORIES, layout.COMPACTIONS))]


@local
def test_what_was_stored_before_there_was_a_column_is_read_and_compacted_as_if_each_were_null(
    root: str, monkeypatch: pytest.MonkeyPatch
):
    run = make_run(root)
    with monkeypatch.context() as earlier:
        columns = pa.schema([it for it in CONTENT if it.name not in LATER])
        earlier.setattr("storage.maintenance.compaction_format.COLUMNS", columns)
        compacted(run)
    path = Path(run.url, layout.shard(0, 6))
    path.write_bytes(earlier_shard(path))
    before = tables(run)
    with storage.connect(run) as con:
        assert con.execute(f"select count(*), {COUNTED} from trajectories").fetchone() == (84, *[0] * len(LATER))
    assert check(run).problems == []
    assert drawn(replayed(run), range(9, 12))
    replayed(run).sync(LAST_SYNC + 1, step=100)
    save_checkpoint(run, LAST_SYNC + 1, step=100)
    assert len(compacted(run).written) == 1 and loose(run) == []
    found = tables(run)
    assert [row[:9] for row in found["trajectories"]] == [row[:9] for row in before["trajectories"]]
    with storage.connect(run) as con:
        assert con.execute(f"select count(*), {COUNTED} from trajectories").fetchone() == (84, *[0] * len(LATER))
    assert not [it for it in check(run).problems if it.key.startswith((layout.TRAJECTORIES, layout.COMPACTIONS))]


def earlier_shard(path: Path) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pq.read_table(path).drop_columns(list(LATER)), sink, write_page_checksum=True)
    return sink.getvalue().to_pybytes()


# --- beside a run that lives ------------------------------------------------------------------------------------------


@on_disk_and_s3
def test_a_buffer_that_lives_through_a_compaction_goes_on(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "cache"))
    run = make_run(root)
    expected = drawn(replayed(run), range(9, 20))
    buffer = replayed(run)
    buffer.payloads.limit = 0
    buffer.payloads.reader.copies.limit = 0
    first = drawn(buffer, range(9, 12))
    compacted(run, keep=2)
    second = drawn(buffer, range(12, 15))
    compacted(run, keep=1)
    third = drawn(buffer, range(15, 20))
    assert first + second + third == expected
    buffer.arrivals.look()
    assert buffer.sync(LAST_SYNC + 1, step=100) == 12


@local
def test_a_connection_shows_the_run_although_it_is_compacted_while_it_is_made(
    root: str, monkeypatch: pytest.MonkeyPatch
):
    run = make_run(root)
    before = tables(run)
    compacted(run, keep=2)
    read, asked = admitted_shards.read_compactions, []

    def meanwhile(snapshot, damage):
        if not asked:
            asked.append(compacted(run))
        return read(snapshot, damage)

    monkeypatch.setattr(admitted_shards, "read_compactions", meanwhile)
    assert tables(run) == before
    assert asked
    with storage.connect(run) as con:
        assert con.sql("from damage").fetchall() == []


# --- forks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("when", "root"),
    [
        ("before", "local"),
        ("after", "local"),
        pytest.param("before", "moto", marks=pytest.mark.long),
        pytest.param("after", "moto", marks=pytest.mark.long),
    ],
    indirect=["root"],
)
def test_a_fork_of_a_compacted_run_is_what_it_would_have_been(root: str, when: str):
    parent = make_run(root)
    expected = fork(parent, 2, "expected")
    go_on(expected, 2)
    if when == "after":
        compacted(parent)
    run = fork(parent, 2)
    if when == "before":
        compacted(parent)
    go_on(run, 2)
    for it in (run, parent, expected):
        assert check(it).problems == []
    assert tables(run)["draws"] == tables(expected)["draws"]
    assert tables(run)["trajectories"] == tables(expected)["trajectories"]
    done = compacted(run)
    assert done.upto == Version(4, 3) and done.shards == 4
    assert tables(run)["trajectories"] == tables(expected)["trajectories"]
    assert check(run).problems == check(parent).problems == []


@local
@pytest.mark.parametrize("k", [1, 4])
def test_a_fork_that_replays_a_compacted_run_has_at_every_step_what_its_parent_had(root: str, k: int):
    parent = make_run(root)
    compacted(parent)
    run = fork(parent, 0, replays=LAST_SYNC)
    buffer = SyntheticRun.of(run).buffer(claim_attempt(run).number)
    for sync in range(LAST_SYNC * EVERY // k + 1):
        buffer.sync(sync, step=sync * k)
    ids = "trajectory_id, seq, reward, response_tokens"
    with storage.connect(run) as own, storage.connect(parent) as parents:
        rows = [con.execute(f"select {ids} from trajectories order by 1").fetchall() for con in (own, parents)]
        found = parents.execute("select trajectory_id from trajectories where sync is null").fetchall()
        waiting = {trajectory_id for (trajectory_id,) in found}
        assert own.execute("select sync, step, count(*) from trajectories group by all order by 1").fetchall() == [
            (record.sync, record.step, record.rows) for record in read_chain(run) if record.rows
        ]
    assert rows[0] == [row for row in rows[1] if row[0] not in waiting]
    assert check(run).problems == []
