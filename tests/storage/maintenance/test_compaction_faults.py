"""Compactions that are killed, that run at the same time, or that meet damage lose nothing."""

import contextlib
import shutil
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import cast

import pytest

from storage import layout
from storage.log.compactions import PAYLOAD, Compactions
from storage.log.trajectories import Trajectories
from storage.maintenance.check import check
from storage.objects.store import Store
from storage.runs.run import Run
from tba.errors import Damaged, Missing
from tests.support.faults.crashes import Killed, Watched, every_write, first_of_each_kind
from tests.support.sampled_parameters import sampled
from tests.support.storage.compacted import CAPACITY, compacted, drawn, light, loose, objects, replayed, tables
from tests.support.storage.synthetic import copy_run, make_run

local = pytest.mark.parametrize("root", ["local"], indirect=True)


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
