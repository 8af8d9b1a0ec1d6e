"""A run gives the same answers before and after its shards are compacted, for every reader and after every kill.
Payloads that were given up are known and refused by name."""

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import storage
from storage import layout
from storage.buffer.replay_buffer import DuckReplayBuffer
from storage.log.compactions import COLUMNS as CONTENT
from storage.log.compactions import PAYLOAD, Compactions
from storage.log.payloads import Payloads
from storage.log.schema import COLUMNS, LATER, encode
from storage.log.shard_reader import ShardReader
from storage.log.sync_records import read_chain
from storage.log.trajectories import Trajectories
from storage.maintenance.check import check
from storage.maintenance.compactor import Compacted, compact
from storage.objects.store import Entry, Store
from storage.queries import admitted_shards
from storage.runs import retention
from storage.runs.forks import unregister
from storage.runs.retention import given_up_payloads, in_the_way
from storage.runs.run import Run
from storage.weights.attempt_claim import claim_attempt
from tba.errors import Damaged, Missing, Superseded
from tba.types import Version
from tests.support.builders import make_shard, rows_of
from tests.support.faults.crashes import Killed, Watched, every_write, first_of_each_kind
from tests.support.sampled_parameters import sampled
from tests.support.storage.compacted import replayed, save_checkpoint
from tests.support.storage.indexes import make_eligibility
from tests.support.storage.synthetic import EVERY, LAST_SYNC, SyntheticRun, copy_run, make_run
from tests.support.storage.synthetic_forks import fork, go_on

local = pytest.mark.parametrize("root", ["local"], indirect=True)
on_disk_and_s3 = pytest.mark.parametrize("root", sampled(["local", "moto"], kept=["local"]), indirect=True)

VIEWS = ("trajectories", "groups", "shards", "syncs", "steps", "draws", "versions", "checkpoints", "attempts")
CAPACITY = 2
COUNTED = ", ".join(f"count({name})" for name in LATER)


def compacted(run: Run, *, keep: int = 1, drop_beyond: int | None = None, **rule: Any) -> Compacted:
    return compact(
        run, keep_checkpoints=keep, drop_beyond=None if drop_beyond is None else make_eligibility(drop_beyond, **rule)
    )


def tables(run: Run, *, without: Sequence[str] = ()) -> dict[str, list[tuple]]:
    """Return the rows of every view, sorted."""
    found = {}
    with storage.connect(run) as con:
        for view in VIEWS:
            names = [name for name, *_ in con.execute(f"describe {view}").fetchall() if name not in without]
            found[view] = sorted(con.execute(f"select {', '.join(names)} from {view}").fetchall(), key=repr)
    return found


def loose(run: Run) -> list[str]:
    return [entry.key for entry in run.own.list(layout.TRAJECTORIES)]


def objects(run: Run) -> list[str]:
    return [entry.key for entry in run.own.list(layout.COMPACTIONS) if entry.key.endswith(".parquet")]


def findings(run: Run) -> tuple[list, dict[str, int]]:
    found = check(run)
    return found.problems, {kind: number for kind, number in found.checked.items() if kind != "compactions"}


def drawn(buffer: DuckReplayBuffer, steps: range) -> list[tuple]:
    return [(draws := buffer.draw(step), rows_of(buffer.fetch(draws))) for step in steps]


def light(run: Run) -> list[pa.Table]:
    shards = [shard for record in read_chain(run) for shard in record.shards]
    return [table for _, table in ShardReader(run, disk_bytes=0).light(shards, COLUMNS)]


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


# --- what reading costs -----------------------------------------------------------------------------------------------


class Asked:
    """A store that records the requested ranges of compactions."""

    def __init__(self, store: Store):
        self.store = store
        self.ranges: list[tuple[str, int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def read_range(self, key: str, start: int, length: int) -> bytes:
        self.ranges.append((key, start, start + length))
        return self.store.read_range(key, start, length)


def asked(run: Run) -> tuple[Run, Asked]:
    store = Asked(run.store)
    return replace(run, store=cast(Store, store)), store


def every_row(run: Run, *, disk_bytes: int) -> list:
    """Read rows like a trainer that has just started: first the light columns, then two rows of each shard."""
    shards = [shard for record in read_chain(run) for shard in record.shards]
    payloads = Payloads(run, memory_bytes=0, disk_bytes=disk_bytes)
    found: list = [table for _, table in payloads.reader.light(shards, COLUMNS)]
    return found + [rows_of(payloads.fetch([(shard, row) for shard in reversed(shards)])) for row in (0, 5)]


@pytest.mark.parametrize("root", ["moto"], indirect=True)
def test_each_compaction_is_opened_once_and_a_later_life_asks_for_nothing(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("storage.maintenance.compactor.SHARDS", 5)
    run = make_run(root)
    expected = every_row(run, disk_bytes=0)
    compacted(run)
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "another machine"))
    watching, store = asked(run)
    assert every_row(watching, disk_bytes=1 << 30) == expected
    sizes = {it.object: it.bytes for it in Compactions(run).look()}
    assert len(sizes) == 3
    assert sorted(key for key, _, end in store.ranges if end == sizes[key]) == sorted(sizes)
    store.ranges.clear()
    assert every_row(watching, disk_bytes=1 << 30) == expected
    assert store.ranges == []
    for copy in (tmp_path / "another machine" / "shards").iterdir():
        copy.write_bytes(copy.read_bytes()[:-1])
    assert every_row(watching, disk_bytes=1 << 30) == expected
    assert store.ranges
    store.ranges.clear()
    assert every_row(watching, disk_bytes=0) == expected
    assert store.ranges


@pytest.mark.parametrize("root", ["moto"], indirect=True)
def test_copies_of_compacted_shards_stay_within_their_budget(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = make_run(root)
    expected = every_row(run, disk_bytes=0)
    compacted(run)
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "cache"))
    assert every_row(run, disk_bytes=10_000) == expected
    sizes = [copy.stat().st_size for copy in (tmp_path / "cache" / "shards").iterdir()]
    assert 0 < sum(sizes) <= 10_000


@pytest.mark.parametrize("root", ["moto"], indirect=True)
def test_what_has_been_given_up_is_missing_in_a_copy_too(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = make_run(root)
    compacted(run, drop_beyond=CAPACITY)
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "cache"))
    for _ in range(2):
        with pytest.raises(Missing, match=r"the tokens of row \d have been given up"):
            every_row(run, disk_bytes=1 << 30)


class Behind:
    """A store whose next `looks` listings show nothing of compactions."""

    def __init__(self, store: Store, looks: int):
        self.store, self.looks = store, looks

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def list(self, prefix: str = "", *, after: str = "") -> list[Entry]:
        if prefix != layout.COMPACTIONS or self.looks <= 0:
            return self.store.list(prefix, after=after)
        self.looks -= 1
        return []


@pytest.mark.parametrize("root", ["moto"], indirect=True)
def test_a_shard_that_is_listed_nowhere_yet_is_looked_for_until_the_deadline(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "cache"))
    run = make_run(root)
    expected = every_row(run, disk_bytes=0)
    compacted(run)
    late = replace(run, store=cast(Store, Behind(run.store, looks=50)))
    assert every_row(late, disk_bytes=0) == expected
    impatient = {"limits": {"store_deadline": 0.3}}
    with pytest.raises(Missing, match=r"seq=00000000\.parquet does not exist"):
        every_row(replace(run, store=cast(Store, Behind(run.store, looks=10**6)), config=impatient), disk_bytes=0)


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


# --- kills ------------------------------------------------------------------------------------------------------------


def die(store: Watched, name: str, key: str) -> None:
    store.dead = True


def use_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let compactions read and remove one object after the other."""
    for module in ("compaction_reader", "compaction_removal"):
        monkeypatch.setattr(f"storage.maintenance.{module}.SIDE_BY_SIDE", 1)


def watched(run: Run, at: int, happen) -> tuple[Run, Watched]:
    store = Watched(run.store, at, happen)
    return replace(run, store=cast(Store, store)), store


@local
@pytest.mark.slow
@pytest.mark.long
@every_write
@pytest.mark.parametrize("drop_beyond", [None, CAPACITY])
def test_a_compaction_that_is_killed_at_any_write_leaves_everything_and_the_next_finishes_it(
    root: str, tmp_path: Path, drop_beyond: int | None, every: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("storage.maintenance.compactor.SHARDS", 16)
    use_one_thread(monkeypatch)
    whole = make_run(root)
    compacted(whole, keep=2)  # an existing compaction, which is later replaced by a larger one
    before = tables(whole, without=PAYLOAD)
    draws = drawn(replayed(whole, capacity=CAPACITY), range(9, 20))
    finished = copy_run(whole, tmp_path / "finished")
    watching, store = watched(finished, 0, lambda name, key: None)
    compacted(watching, drop_beyond=drop_beyond)
    number = len(store.writes)
    assert number >= 10
    for at in range(1, number + 2) if every else first_of_each_kind(store.writes):
        run = copy_run(whole, tmp_path / str(at))
        watching, store = watched(run, at, lambda name, key: None)
        store.happen = partial(die, store)
        with contextlib.suppress(Killed):
            compacted(watching, drop_beyond=drop_beyond)
        assert store.dead == (at <= number)
        for _ in range(2):
            assert tables(run, without=PAYLOAD) == before, at
            assert check(run).problems == [], at
            assert drawn(replayed(run, capacity=CAPACITY), range(9, 20)) == draws, at
            compacted(run, drop_beyond=drop_beyond)
        assert loose(run) == loose(finished)
        assert objects(run) == [it.object for it in Compactions(run).look()]
        assert not [note for note in check(run).notes if "compaction" in note], at
        shutil.rmtree(run.url)


@local
@pytest.mark.slow
@every_write
@pytest.mark.parametrize("keep", sampled([1, 2], kept=[2]))
def test_two_compactions_at_once_do_no_harm(
    root: str, tmp_path: Path, keep: int, every: bool, monkeypatch: pytest.MonkeyPatch
):
    use_one_thread(monkeypatch)
    whole = make_run(root)
    before = tables(whole)
    watching, store = watched(copy_run(whole, tmp_path / "alone"), 0, lambda name, key: None)
    compacted(watching)
    for at in count(1) if every else first_of_each_kind(store.writes):
        run = copy_run(whole, tmp_path / str(at))
        watching, store = watched(run, at, lambda name, key, run=run: compacted(run, keep=keep))
        compacted(watching)
        assert tables(run) == before
        assert check(run).problems == []
        compacted(run)
        assert len(objects(run)) == 1
        assert not [note for note in check(run).notes if "compaction" in note], at
        shutil.rmtree(run.url)
        if len(store.writes) < at:
            break


# --- damage -----------------------------------------------------------------------------------------------------------


@local
def test_a_damaged_shard_is_not_compacted_and_not_removed(root: str):
    run = make_run(root)
    key = layout.shard(0, 2)
    path = Path(run.url, key)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    done = compacted(run)
    assert list(done.left) == [key] and "sha256" in done.left[key]
    assert path.exists() and done.shards == 11
    assert [it.key for it in check(run).problems] == [key]
    assert compacted(run).written == []


@local
def test_damage_of_a_compaction_is_found_by_name(root: str):
    run = make_run(root)
    compacted(run)
    [key] = objects(run)
    path = Path(run.url, key)
    data = path.read_bytes()
    path.write_bytes(data[:200] + bytes(4000) + data[4200:])
    assert [it.key for it in check(run).problems if it.key == key] == [key]
    with pytest.raises(Damaged, match="compactions"):
        light(run)
    path.unlink()
    assert key in {it.key for it in check(run).problems}
    with pytest.raises(Missing):
        light(run)


@local
def test_requests_in_a_compaction_that_is_damaged_or_gone_are_skipped(root: str):
    run = make_run(root)
    before = Trajectories(run).asked(0, [2])
    compacted(run)
    assert Trajectories(run).asked(0, [2]) == before != []
    path = Path(run.url, objects(run)[0])
    path.write_bytes(bytes(path.stat().st_size))
    assert Trajectories(run).asked(0, [2]) == []
    path.unlink()
    assert Trajectories(run).asked(0, [2]) == []


@local
def test_shards_are_not_removed_for_a_compaction_that_is_damaged(root: str):
    run = make_run(root)
    kept = {key: run.store.read(key) for key in loose(run)}
    compacted(run)
    for key, data in kept.items():
        if not run.store.exists(key):
            run.store.create(key, data)
    path = Path(run.url, objects(run)[0])
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    left = compacted(run).left
    assert left and all("sha256" in why for why in left.values())
    assert set(loose(run)) == kept.keys()


# --- payloads ---------------------------------------------------------------------------------------------------------


@on_disk_and_s3
def test_rows_that_cannot_be_drawn_any_more_lose_their_tokens_and_nothing_else(root: str):
    run = make_run(root)
    before = tables(run, without=PAYLOAD)
    buffer = replayed(run, capacity=CAPACITY)
    pool = buffer.index.pool.table()
    eligible = sum(pool["drawable"].to_pylist())
    draws = drawn(buffer, range(9, 40))
    done = compacted(run, drop_beyond=CAPACITY)
    assert done.payloads_given_up == 72 - eligible > 0
    assert tables(run, without=PAYLOAD) == before
    with storage.connect(run) as con:
        for column in PAYLOAD:
            count = f"select count(*) from trajectories where {column} is null"
            assert con.execute(count).fetchall() == [(72 - eligible,)]
    assert drawn(replayed(run, capacity=CAPACITY), range(9, 40)) == draws
    [record] = given_up_payloads(run)
    assert (record.number, record.payloads.columns, record.payloads.step) == (done.retention, PAYLOAD, 8)
    assert check(run).problems == []
    assert compacted(run, drop_beyond=CAPACITY).written == []
    assert len(given_up_payloads(run)) == 1


@local
@pytest.mark.parametrize("damage", ["manifest", "gone", "short"])
def test_nothing_is_given_up_behind_a_checkpoint_that_nobody_could_go_on_from(root: str, damage: str):
    run = make_run(root)
    before = {key: run.store.read(key) for key in loose(run)}
    [folder] = sorted(Path(run.url, "checkpoints").iterdir())[-1:]
    manifest = folder / "MANIFEST.json"
    [file, *_] = [path for path in folder.iterdir() if path != manifest]
    if damage == "manifest":
        manifest.write_text("{}")
    elif damage == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(
        Damaged, match=f"checkpoints/{folder.name}/{manifest.name if damage == 'manifest' else file.name}"
    ):
        compacted(run, drop_beyond=CAPACITY)
    assert {key: run.store.read(key) for key in loose(run)} == before and not run.store.list(layout.RETENTION)


@local
def test_where_the_worst_are_evicted_others_lose_their_tokens(root: str, tmp_path: Path):
    run, other = make_run(root), make_run(str(tmp_path))
    buffer = replayed(run, capacity=CAPACITY, evict="worst")
    pool = buffer.index.pool.table()
    draws = drawn(buffer, range(9, 40))
    done = compacted(run, drop_beyond=CAPACITY, evict="worst")
    assert done.payloads_given_up == 72 - sum(pool["drawable"].to_pylist()) > 0
    assert drawn(replayed(run, capacity=CAPACITY, evict="worst"), range(9, 40)) == draws
    assert [it.payloads.eligibility.evict for it in given_up_payloads(run)] == ["worst"]
    assert check(run).problems == []
    compacted(other, drop_beyond=CAPACITY)
    with pytest.raises(Missing, match="have been given up"):
        drawn(replayed(other, capacity=CAPACITY, evict="worst"), range(9, 40))


@local
def test_what_has_become_too_old_loses_its_tokens(root: str):
    run, rule = make_run(root), {"max_age": 3}
    buffer = replayed(run, **rule)
    buffer.draw(9)
    drawable = {it for places in (buffer.index.pool.places([n])[0] for n in range(6)) for it in places.tolist()}
    draws = drawn(replayed(run, **rule), range(9, 10))
    done = compacted(run, drop_beyond=100, **rule)
    assert done.payloads_given_up == len(buffer.index.pool.rows) - len(drawable) > 0
    assert compacted(run, drop_beyond=100, **rule).written == []
    assert drawn(replayed(run, **rule), range(9, 10)) == draws
    assert [it.payloads.eligibility.max_age for it in given_up_payloads(run)] == [3]
    with pytest.raises(Missing, match="have been given up"):
        drawn(replayed(run), range(9, 40))
    assert check(run).problems == []


@local
def test_tokens_that_were_given_up_are_missing_by_name_and_the_record_says_for_which_steps(root: str):
    run = make_run(root)
    compacted(run, drop_beyond=CAPACITY)
    with pytest.raises(Missing, match=r"seq=00000000\.parquet: the tokens of row \d have been given up"):
        drawn(replayed(run, 0), range(1, 9))
    assert in_the_way(run, 2, 3) and in_the_way(run, 0, 0)
    assert not in_the_way(run, 4, 4)


@local
def test_payloads_are_given_up_of_what_was_compacted_before(root: str):
    run = make_run(root)
    compacted(run)
    once = compacted(run, drop_beyond=4)
    more = compacted(run, drop_beyond=CAPACITY)
    assert once.payloads_given_up > 0 < more.payloads_given_up
    assert len(objects(run)) == 1
    assert len(given_up_payloads(run)) == 2
    assert check(run).problems == []


@local
def test_tokens_that_lack_without_a_record_that_gives_them_up_are_a_problem(root: str):
    run = make_run(root)
    compacted(run, drop_beyond=CAPACITY)
    Path(run.url, layout.retention(1)).unlink()
    assert any("no retention record gives these up" in it.problem for it in check(run).problems)


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


@local
@pytest.mark.parametrize(("sync", "replays", "first"), [(2, None, 3), (0, 4, 5), (0, None, 1)])
def test_what_a_fork_may_draw_is_not_given_up(root: str, sync: int, replays: int | None, first: int):
    parent = make_run(root)
    run = fork(parent, sync, replays=replays)
    before = tables(run)["trajectories"]
    compacted(parent, drop_beyond=CAPACITY)
    assert tables(run)["trajectories"] == before
    assert [it.payloads.first_sync for it in given_up_payloads(parent)] == ([first] if first <= LAST_SYNC else [])
    assert not in_the_way(run, sync, sync)
    assert check(run).problems == check(parent).problems == []


@local
def test_a_fork_of_what_has_been_given_up_is_refused(root: str):
    parent = make_run(root)
    compacted(parent, drop_beyond=CAPACITY)
    with pytest.raises(
        Missing, match=r"retention/000001\.json of .* has given up tokens that a fork from step 4 draws"
    ):
        fork(parent, 2)
    assert not parent.store.exists(layout.fork("fork"))
    fork(parent, 4)


@local
@pytest.mark.parametrize("moment", ["before the record of it", "after the record of it"])
def test_giving_up_and_forking_at_once_leave_the_payloads_or_refuse_the_fork(
    root: str, monkeypatch: pytest.MonkeyPatch, moment: str
):
    parent = make_run(root)
    made: list[Run] = []
    refused: list[Missing] = []
    give_up = retention.give_up

    def attempt() -> None:
        try:
            made.append(fork(parent, 2))
        except Missing as error:
            refused.append(error)

    def meanwhile(*arguments, **named) -> int:
        if moment.startswith("before"):
            attempt()
        number = give_up(*arguments, **named)
        if moment.startswith("after"):
            attempt()
        return number

    monkeypatch.setattr(retention, "give_up", meanwhile)
    compacted(parent, drop_beyond=CAPACITY)
    assert len(made) + len(refused) == 1
    for run in made:
        with storage.connect(run) as con:
            assert con.execute("select count(*) from trajectories where response_tokens is null").fetchall() == [(0,)]
    assert check(parent).problems == []


@local
def test_once_a_fork_is_gone_its_payloads_can_be_given_up(root: str):
    parent = make_run(root)
    fork(parent, 4)
    assert compacted(parent, drop_beyond=CAPACITY).payloads_given_up == 0
    unregister(parent, layout.fork("fork"))
    assert compacted(parent, drop_beyond=CAPACITY).payloads_given_up > 0
