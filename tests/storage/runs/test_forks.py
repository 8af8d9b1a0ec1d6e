"""A fork shares what its parent had stored by a step, and adds its own objects. Neither run harms the other."""

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from storage import layout
from storage.log.schema import encode, to_table
from storage.log.sync_records import Recording, Shard, read_chain
from storage.log.trajectories import Trajectories
from storage.maintenance.check import check
from storage.runs.control import read_state
from storage.runs.inheritance import ForkedStore, Parent
from storage.runs.run import Run
from storage.weights.attempt_claim import claim_attempt
from storage.weights.checkpoints import Checkpoints
from storage.weights.versions import Versions
from tba.errors import AlreadyExists, Damaged, Missing, StorageError
from tba.types import Version
from tests.support.builders import make_shard
from tests.support.faults.rewriting import replace_text
from tests.support.storage.synthetic import EVERY, LAST_SYNC, PROMPTS, SyntheticRun, make_run
from tests.support.storage.synthetic_forks import fork, go_on, rows
from tests.support.stores import long_on_s3

local = pytest.mark.parametrize("root", ["local"], indirect=True)


def test_what_the_parent_refused_later_does_not_wait_in_a_replay(tmp_path: Path):
    made = SyntheticRun(str(tmp_path), "first").begin()
    buffer = made.take_syncs(1, range(1, 2), made.buffer(1))
    odd = [replace(it, reward=float("nan")) for it in make_shard({PROMPTS[0]: [1.0]}, searcher=5)]
    made.run.store.create(layout.shard(5, 0), encode(to_table(odd, run=made.run.name, searcher=5, seq=0)))
    made.take_syncs(1, range(2, 4), buffer)
    replay = fork(made.run, 0, replays=3)
    shards = "select state from shards where searcher = 5"
    assert (rows(made.run, shards), rows(replay, shards)) == ([("refused",)], [])
    rewards = "select count(*), avg(reward) from trajectories"
    assert rows(replay, rewards) == rows(made.run, rewards)
    assert check(replay).problems == []


def names(run: Run) -> set[str]:
    return {entry.key for entry in run.own.list()}


def test_a_fork_goes_on_from_what_its_parent_had_and_both_are_sound(root: str):
    parent = make_run(root)
    before = {key: parent.store.read(key) for key in names(parent)}
    run = fork(parent, 2)
    go_on(run, 2)
    assert {key: parent.store.read(key) for key in before} == before
    assert names(parent) - before.keys() == {layout.fork("fork")}
    for each in (run, parent):
        assert check(each).problems == []
    shared = [record.sync for record in read_chain(run) if record in read_chain(parent)]
    assert shared == [0, 1, 2]
    assert rows(run, "select step, sync, attempt from steps order by step") == [
        (step, (step + 1) // EVERY, 1 if step <= 4 else 3) for step in range(1, LAST_SYNC * EVERY + 1)
    ]
    assert not rows(run, "select trajectory_id from trajectories group by 1 having count(*) > 1")
    shards = "select key, sha256 from shards where sync <= 2 order by key"
    assert rows(run, shards) == rows(parent, shards)


@long_on_s3
def test_nothing_is_copied(root: str):
    parent = make_run(root)
    run = fork(parent, 2)
    assert names(run) == {layout.RUN, layout.STATE}
    inherited = {entry.key for entry in run.store.list()} - names(run)
    assert layout.prompts("train") in inherited
    assert {layout.sync(n) for n in range(3)} <= inherited and layout.sync(3) not in inherited
    assert {layout.steps(1, 1), layout.draws(2, 1)} <= inherited and layout.steps(3, 2) not in inherited
    for key in inherited:
        assert run.store.exists(key)
        assert run.store.read(key) == parent.store.read(key)
    assert run.store.read_many(sorted(inherited)) == [run.store.read(key) for key in sorted(inherited)]


@long_on_s3
def test_a_fork_loads_what_it_inherits_as_a_difference_and_its_base_stays_as_long(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    parent, version = make_run(root), Version(LAST_SYNC, 2)
    run = fork(parent, LAST_SYNC)
    Versions(parent).prune(keep=1, every=100)
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "of another machine"))
    assert Versions(parent).base(version) == Version(2, 2)
    assert (Versions(run).load(version) / "model.safetensors").read_bytes() == f"weights {version}".encode() * 20
    assert check(parent).ok and check(run).ok


@local
def test_what_the_parent_stores_later_is_not_the_forks(root: str):
    parent = SyntheticRun(root, "first").begin()
    parent.take_syncs(1, range(1, 3), parent.buffer(1))
    run = fork(parent.run, 2)
    seen = {entry.key for entry in run.store.list()}
    parent.search(version=2)
    claim_attempt(parent.run)
    again = parent.buffer(2)
    again.replay(2)
    parent.take_syncs(2, range(3, 5), again)
    # Inherited objects do not depend on when the run is opened.
    assert {entry.key for entry in Run.open(run.url).store.list()} == seen


@local
def test_inherited_names_are_taken_and_inherited_objects_cannot_be_changed(root: str, tmp_path: Path):
    parent = make_run(root)
    run = fork(parent, 2)
    (tmp_path / "file").write_bytes(b"x")
    for key in (layout.sync(1), layout.shard(0, 0), layout.steps(2, 1), layout.attempt(2), layout.prompts("train")):
        with pytest.raises(AlreadyExists, match="inherited"):
            run.store.create(key, b"mine")
        for change in (
            lambda key=key: run.store.delete(key),
            lambda key=key: run.store.replace(key, b"mine", tag=None),
            lambda key=key: run.store.upload(tmp_path / "file", key),
        ):
            with pytest.raises(StorageError, match="inherited"):
                change()
    assert check(parent).ok


@local
def test_searchers_of_a_fork_go_on_where_its_parent_was_and_never_under_a_name_it_shares(root: str):
    parent = make_run(root)
    run = fork(parent, 1)
    admitted = {(shard.searcher, shard.seq) for record in read_chain(run) for shard in record.shards}
    for searcher in range(2):
        mine = {seq for owner, seq in admitted if owner == searcher}
        assert Trajectories(run).next_seq(searcher) == max(mine) + 1
        assert Trajectories(parent).next_seq(searcher) > max(mine) + 1
        inherited = Trajectories(run).asked(searcher, range(max(mine) + 1))
        assert inherited and inherited == Trajectories(parent).asked(searcher, range(max(mine) + 1))


@long_on_s3
def test_a_fork_of_a_fork(root: str):
    parent = make_run(root)
    first = fork(parent, 2, "first-fork")
    go_on(first, 2)
    origin = Parent(run=first.name, step=6, sync=3, attempt=3, attempts=3, replays=None, rebuilt=True)
    second = Run.create(
        first.root, "second-fork", config=first.config, sampler_sql=first.sampler_sql, code_version="x", parent=origin
    )
    assert [record.sync for record in read_chain(second)] == [0, 1, 2, 3]
    assert {second.writer_of(layout.sync(n)) for n in range(5)} == {parent.name, first.name, second.name}
    assert Checkpoints(second).complete() == [Version(2, 1)]  # the fork itself keeps the checkpoint of sync 3
    assert second.store.exists(layout.steps(3, 3)) and not second.store.exists(layout.steps(4, 3))


@local
@pytest.mark.parametrize("k", [1, 2, 4])
def test_a_fork_that_replays_has_at_every_step_what_its_parent_had(root: str, k: int):
    parent = make_run(root)
    run = fork(parent, 0, replays=LAST_SYNC)
    buffer = SyntheticRun.of(run).buffer(claim_attempt(run).number)
    for sync in range(LAST_SYNC * EVERY // k + 1):
        buffer.sync(sync, step=sync * k)
        entered = [record for record in read_chain(parent) if record.step <= sync * k]
        assert {shard.key for shard in buffer.shards.values()} == {s.key for it in entered for s in it.shards}
    buffer.sync(sync + 1, step=1000)
    assert read_chain(run)[-1].rows == 0
    ages = "select trajectory_id, version_step from trajectories where sync is not null order by 1"
    assert rows(run, ages) == rows(parent, ages)
    assert check(run).problems == []


@local
def test_a_name_that_the_parent_refused_is_not_taken_by_a_searcher_of_the_fork(root: str):
    parent = SyntheticRun(root, "first").begin()
    parent.run.store.create(layout.shard(0, 1), b"no shard")
    buffer = parent.buffer(1)
    buffer.sync(0, step=0)
    origin = Parent(run="first", step=0, sync=0, attempt=1, attempts=1, replays=None, rebuilt=False)
    run = Run.create(
        root, "fork", config=parent.run.config, sampler_sql=parent.run.sampler_sql, code_version="test", parent=origin
    )
    assert Trajectories(run).next_seq(0) == 2


@local
def test_a_look_of_a_fork_asks_nothing_about_what_its_parent_has_stored_since(
    root: str, monkeypatch: pytest.MonkeyPatch
):
    parent = make_run(root)
    run = fork(parent, 2)
    assert run.inherits
    newest = max(key for key in run.inherits.inherited_shards if "searcher=000" in key)
    monkeypatch.setattr(run.inherits.parent, "list", None)
    assert run.store.list(layout.searcher_folder(0), after=newest) == []


@local
def test_a_look_of_a_fork_does_not_go_through_what_it_inherits(root: str):
    parent = make_run(root)
    run = fork(parent, 2)
    shown = run.inherits
    assert shown
    names, newest = run.store.folders(layout.TRAJECTORIES), max(shown.inherited_shards)

    class Asked(frozenset):
        def __iter__(self):
            raise AssertionError("all of them")

    shown.__dict__["inherited_shards"] = Asked(list(shown.inherited_shards))
    assert run.store.folders(layout.TRAJECTORIES) == names == ["searcher=000", "searcher=001"]
    assert run.store.list(layout.TRAJECTORIES, after=newest) == []
    assert layout.shard(0, 0) in {entry.key for entry in run.store.list(layout.searcher_folder(0))}


@local
def test_what_has_entered_the_buffer_of_a_replay_is_not_gone_through_again(root: str):
    parent = make_run(root)
    recording = Recording(cast(ForkedStore, fork(parent, 0, replays=LAST_SYNC).inherits))
    shards = [list(record.shards) for record in read_chain(parent)]

    names: list[str] = []

    class Asked(dict):
        def __contains__(self, name: object) -> bool:
            names.append(str(name))
            return super().__contains__(name)

    def named(it: Shard) -> str:
        return f"{it.searcher}/{it.seq}"

    admitted = Asked()
    for sync in range(LAST_SYNC + 1):
        for step in (sync * EVERY, sync * EVERY):  # the second time, the record that was not stored is made again
            assert recording.arrivals(step, admitted) == sorted(shards[sync], key=lambda it: (it.searcher, it.seq))
        admitted.update((named(it), it) for it in shards[sync])
    names.clear()
    assert recording.arrivals(100, admitted) == []
    assert set(names) <= {named(it) for it in shards[-1]}


@local
def test_a_fork_has_a_state_and_leases_of_its_own(root: str):
    parent = make_run(root)
    run = fork(parent, 2)
    assert (read_state(run).desired, read_state(parent).desired) == ("run", "stop")
    assert rows(run, "select count(*) from events") == [(0,)]


@local
def test_a_fork_whose_parent_is_gone_or_whose_record_makes_no_sense_says_so(root: str):
    parent = make_run(root)
    run = fork(parent, 2)
    Path(parent.url, layout.RUN).rename(Path(parent.url, "gone.json"))
    with pytest.raises(Missing, match="a fork of 'first', which does not exist beside it"):
        Run.open(run.url)
    Path(parent.url, "gone.json").rename(Path(parent.url, layout.RUN))
    path = Path(run.url, layout.RUN)
    replace_text(path, '"attempts": 2', '"attempts_": 2')
    with pytest.raises(Damaged, match=r"run.json lacks 'attempts'"):
        Run.open(run.url)
