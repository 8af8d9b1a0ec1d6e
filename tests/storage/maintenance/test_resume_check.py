"""A run continues only if it has every shard that its records admit, and no name in a record is used again."""

from pathlib import Path

import pytest

import storage
from storage import layout
from storage.log.sync_records import read_chain
from storage.log.trajectories import Trajectories
from storage.maintenance.check import check
from storage.maintenance.compactor import compact
from storage.maintenance.resume_check import find_lost, first_sync, refuse_damage
from storage.runs.retention import GivenUpShards
from storage.runs.retention import give_up as write_record
from storage.runs.run import Run
from tba.errors import Damaged, Missing
from tests.support.builders import make_shard
from tests.support.storage.synthetic import LAST_SYNC, PROMPTS, SyntheticRun, copy_run, make_run
from tests.support.storage.synthetic_forks import fork

LOST = layout.shard(0, 3)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(str(tmp_path_factory.mktemp("root")))


@pytest.fixture
def whole(finished: Run, tmp_path: Path) -> Run:
    return copy_run(finished, tmp_path)


def cut(run: Run) -> None:
    path = Path(run.url, LOST)
    path.write_bytes(path.read_bytes()[:-1])


def flip(run: Run) -> None:
    data = bytearray(Path(run.url, LOST).read_bytes())
    data[len(data) // 2] ^= 1
    Path(run.url, LOST).write_bytes(data)


def replace(run: Run) -> None:
    """Replace the shard by a valid shard of another round."""
    Path(run.url, LOST).write_bytes(Path(run.url, layout.shard(0, 2)).read_bytes())


def remove(run: Run) -> None:
    run.store.delete(LOST)


def give_up(run: Run) -> None:
    shards = GivenUpShards(keys=(LOST,), first_sync=first_sync(run, [LOST]), attempt=2)
    write_record(run, shards=shards, why="the disk lost it")


def test_the_name_of_a_lost_shard_is_never_taken_again(whole: Run):
    log = Trajectories(whole)
    before = log.next_seq(0)
    remove(whole)
    assert Trajectories(whole).next_seq(0) == before
    log.append(0, before, make_shard({PROMPTS[0]: [1.0]}, round=before))
    assert not whole.store.exists(LOST)


def test_the_name_of_a_refused_shard_is_never_taken_again(tmp_path: Path):
    made = SyntheticRun(str(tmp_path), "first").begin()
    path = Path(made.run.url, layout.shard(0, 1))
    path.write_bytes(b"torn")
    buffer = made.buffer(1)
    made.take_syncs(1, range(1, 2), buffer)
    assert any(it.key == layout.shard(0, 1) for record in read_chain(made.run) for it in record.refused)
    path.unlink()
    assert Trajectories(made.run).next_seq(0) > 1


def test_a_lost_shard_is_not_written_again_by_filling_a_gap_before_it(tmp_path: Path):
    made = SyntheticRun(str(tmp_path), "first").begin()
    buffer = made.take_syncs(1, range(1, 3), made.buffer(1))
    log = Trajectories(made.run)
    gap = log.next_seq(0)
    lost = log.append(0, gap + 1, make_shard({PROMPTS[0]: [1.0]}, round=gap + 1))
    buffer.draw(5)
    buffer.sync(3, step=6)
    made.run.store.delete(lost)
    assert first_sync(made.run, [lost]) == 3
    assert Trajectories(made.run).next_seq(0) == gap + 2


@pytest.mark.parametrize("damage", [cut, flip, replace, remove])
def test_what_records_admit_and_is_damaged_is_named_before_anything_is_written(whole: Run, damage):
    refuse_damage(whole, whole=True)
    damage(whole)
    stored = [entry.key for entry in whole.store.list()]
    assert list(find_lost(whole, whole=True)) == [LOST]
    with pytest.raises(Damaged, match=r"seq=00000003\.parquet.*tba give-up"):
        refuse_damage(whole, whole=True)
    assert [entry.key for entry in whole.store.list()] == stored


def test_a_shard_that_lies_in_a_compaction_is_not_lost(whole: Run):
    compact(whole, keep_checkpoints=1)
    assert not whole.store.exists(LOST)
    assert find_lost(whole, whole=True) == {}
    [compaction] = [it.key for it in whole.store.list(layout.COMPACTIONS) if it.key.endswith(".parquet")]
    whole.store.delete(compaction)
    lost = find_lost(whole, whole=True)
    assert LOST in lost and compaction in lost[LOST]
    assert lost == find_lost(whole, whole=False)


def test_a_fork_that_replays_needs_what_it_has_not_admitted_yet(finished: Run, tmp_path: Path):
    parent = copy_run(finished, tmp_path / "runs")
    replay = fork(parent, 2, replays=LAST_SYNC)
    later = read_chain(parent)[LAST_SYNC].shards[0].key
    assert later not in {shard.key for record in read_chain(replay) for shard in record.shards}
    assert find_lost(replay, whole=True) == {}
    parent.store.delete(later)
    assert find_lost(replay, whole=True) == {later: "is missing"}
    assert first_sync(replay, [later]) == 3
    assert find_lost(fork(parent, 2, "plain"), whole=True) == {}


@pytest.mark.parametrize("root", ["moto"], indirect=True)
def test_on_a_remote_store_what_is_missing_or_of_another_size_is_named(root: str):
    run = make_run(root)
    assert find_lost(run, whole=True) == {}
    run.store.delete(LOST)
    assert find_lost(run, whole=True) == {LOST: "is missing"}
    run.store.create(LOST, b"short")
    assert "bytes" in find_lost(run, whole=True)[LOST]


@pytest.mark.parametrize("split", ["train", "test"])
def test_prompts_that_are_gone_or_changed_stop_a_run(whole: Run, split: str):
    path = Path(whole.url, layout.prompts(split))
    data = path.read_bytes()
    path.write_bytes(data[:200] + bytes([data[200] ^ 1]) + data[201:])
    with pytest.raises(Damaged, match=f"prompts/{split}"):
        refuse_damage(whole, whole=True)
    path.unlink()
    with pytest.raises((Damaged, Missing), match=f"prompts/{split}"):
        refuse_damage(whole, whole=True)


def test_a_run_goes_on_without_what_was_given_up_and_a_check_says_so(whole: Run):
    remove(whole)
    assert not check(whole).ok
    give_up(whole)
    findings = check(whole)
    assert findings.problems == []
    assert f"{LOST} was lost and is given up" in findings.notes
    refuse_damage(whole, whole=True)
    with storage.connect(whole) as con:
        lost = con.execute("select count(*) from trajectories where searcher = 0 and seq = 3").fetchall()
        drawn = con.execute("select count(*) from draws where trajectory_id like '0/3/%'").fetchall()
    assert lost == [(0,)]
    assert drawn[0][0] >= 0


def test_a_buffer_without_what_was_given_up_draws_the_same_each_time(whole: Run):
    made = SyntheticRun.of(whole)
    remove(whole)
    give_up(whole)
    both = [made.buffer(2), made.buffer(2)]
    for buffer in both:
        buffer.replay(LAST_SYNC)
    first, second = ([it.draw(step) for step in range(9, 13)] for it in both)
    assert first == second
    assert not any(draw.trajectory_id.startswith("0/3/") for draws in first for draw in draws)
    assert both[0].queues() == both[1].queues() and both[0].queues()["given_up"] == [LOST]


def test_queues_from_before_a_shard_was_given_up_begin_anew(whole: Run):
    made = SyntheticRun.of(whole)
    buffer = made.buffer(2)
    buffer.replay(LAST_SYNC)
    buffer.draw(9)
    before = buffer.queues()
    remove(whole)
    give_up(whole)
    without = made.buffer(2)
    without.replay(LAST_SYNC)
    fresh = without.queues()
    without.restore(before)
    assert without.queues() == fresh
    drawn = made.buffer(2)
    drawn.replay(LAST_SYNC)
    drawn.draw(9)
    drawn.restore(fresh)
    assert drawn.queues() == fresh
