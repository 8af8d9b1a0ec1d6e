"""Forks and retention: pruning leaves what forks start from, and no fork starts from a checkpoint that is given up."""

from collections.abc import Callable
from pathlib import Path

import pytest

from storage import layout
from storage.maintenance.check import check
from storage.objects import manifest_folders, records
from storage.objects.local_store import LocalStore
from storage.runs import retention
from storage.runs.forks import pinned_checkpoints
from storage.runs.inheritance import Parent
from storage.runs.retention import given_up
from storage.runs.run import Run
from storage.weights.checkpoints import Checkpoints
from storage.weights.versions import Versions
from tba.errors import Missing
from tba.types import Version
from tests.support.storage.synthetic import make_run, prune_version
from tests.support.storage.synthetic_forks import fork, go_on, rows

local = pytest.mark.parametrize("root", ["local"], indirect=True)


@local
def test_the_checkpoint_that_a_fork_starts_from_is_not_pruned(root: str):
    parent = make_run(root)
    fork(parent, 2)
    assert pinned_checkpoints(parent) == {Version(2, 1)}
    assert Checkpoints(parent).prune(1) == []
    assert Checkpoints(parent).complete() == [Version(2, 1), Version(4, 2)]
    parent.store.delete(layout.fork("fork"))
    assert Checkpoints(parent).prune(1) == [Version(2, 1)]


@local
@pytest.mark.parametrize("moment", ["before the record of it", "after the record of it"])
def test_pruning_and_forking_at_once_leave_the_checkpoint_or_refuse_the_fork(
    root: str, monkeypatch: pytest.MonkeyPatch, moment: str
):
    parent = make_run(root)
    outcome: list[object] = []
    give_up: Callable = retention.give_up

    def meanwhile(*arguments, **named) -> int:
        if moment.startswith("after"):
            number = give_up(*arguments, **named)
        try:
            outcome.append(fork(parent, 2))
        except Missing as error:
            outcome.append(error)
        return number if moment.startswith("after") else give_up(*arguments, **named)

    monkeypatch.setattr(retention, "give_up", meanwhile)
    Checkpoints(parent).prune(1)
    if isinstance(outcome[0], Run):
        assert Version(2, 1) in Checkpoints(parent).complete()
        go_on(outcome[0], 2)
    else:
        assert not parent.store.exists(layout.fork("fork"))


@local
def test_a_checkpoint_that_was_spared_for_a_fork_can_be_started_from_again(root: str, monkeypatch: pytest.MonkeyPatch):
    parent = make_run(root)
    at_giving_up(monkeypatch, lambda: fork(parent, 2, "one"))
    assert Checkpoints(parent).prune(1) == []
    assert Version(2, 1) in given_up(parent).checkpoints
    go_on(fork(parent, 2, "two"), 2)
    go_on(fork(Run.open(layout.run_url(root, "one")), 2, "of-the-fork"), 2)
    for made in (layout.fork("one"), layout.fork("two")):
        parent.store.delete(made)  # the fork is given up
    assert Checkpoints(parent).prune(1) == [Version(2, 1)]


@local
@pytest.mark.parametrize("other", ["nobody", "who registered and was killed", "of another step"])
def test_no_fork_starts_from_a_checkpoint_that_is_about_to_be_removed(
    root: str, monkeypatch: pytest.MonkeyPatch, other: str
):
    parent = make_run(root)
    refused: list[Missing] = []

    def meanwhile(run: Run, prefix: str) -> None:
        if other != "nobody":
            origin = Parent(run="first", step=4, sync=2, attempt=1, attempts=2, replays=None, rebuilt=False)
            run.store.create(layout.fork("one"), records.encode({"fork": "one", **origin.encode()}))
        if other == "of another step":
            fork(parent, 4, "one")
        with pytest.raises(Missing, match="has just been given up") as found:
            fork(parent, 2, "two")
        refused.append(found.value)
        remove(run.own, prefix)

    remove = manifest_folders.remove
    monkeypatch.setattr(manifest_folders, "remove", lambda store, prefix: meanwhile(parent, prefix))
    assert Checkpoints(parent).prune(1) == [Version(2, 1)]
    assert len(refused) == 1


def at_giving_up(patch: pytest.MonkeyPatch, happen: Callable[[], object]) -> None:
    """Call `happen` once, before the next retention record."""
    give_up: Callable = retention.give_up

    def meanwhile(*arguments, **named) -> int:
        patch.setattr(retention, "give_up", give_up)
        happen()
        return give_up(*arguments, **named)

    patch.setattr(retention, "give_up", meanwhile)


@local
def test_a_fork_sees_what_is_given_up_before_a_listing_shows_it(root: str, monkeypatch: pytest.MonkeyPatch):
    parent = make_run(root)
    listed: Callable = LocalStore.list

    def behind(self, prefix: str = "", *, after: str = "") -> list:
        return [] if prefix == layout.RETENTION else listed(self, prefix, after=after)

    monkeypatch.setattr(LocalStore, "list", behind)
    assert [retention.give_up(parent, why="a test", checkpoints=[Version(n, 1)]) for n in (1, 2)] == [1, 2]
    with pytest.raises(Missing, match="checkpoint 000002-a0001 has just been given up"):
        fork(parent, 2)
    assert given_up(parent).checkpoints == {Version(1, 1), Version(2, 1)}


@local
def test_a_fork_prunes_its_own_and_knows_what_its_parent_has_given_up(root: str):
    parent = make_run(root)
    prune_version(parent, Version(1, 1))
    run = fork(parent, 2)
    go_on(run, 2)
    assert Version(1, 1) in given_up(run).versions
    Versions(run).prune(keep=1, every=100)
    assert {Version(0, 1), Version(2, 1)} <= set(Versions(run).complete())
    assert Versions(run).newest() == Version(4, 3)
    assert all(parent.store.exists(layout.version(v) + layout.MANIFEST) for v in (Version(0, 1), Version(2, 1)))
    assert check(run).problems == check(parent).problems == []
    assert rows(run, "select state from versions where version = 1") == [("removed",)]


@local
def test_what_the_parent_gives_up_later_under_a_name_of_the_forks_is_still_the_forks(root: str):
    parent = make_run(root)
    run = fork(parent, 2)
    go_on(run, 2)
    mine = Version(4, 3)
    assert {mine} <= set(Versions(run).complete()) & set(Checkpoints(run).complete())
    retention.give_up(parent, versions=[mine, Version(1, 1)], checkpoints=[mine], why="a test")
    assert given_up(run).versions == {Version(1, 1)}
    assert not given_up(run).checkpoints
    assert rows(run, "select state from versions where (version, attempt) = (4, 3)") == [("kept",)]


@local
def test_the_checkpoint_that_a_fork_keeps_itself_to_start_from_is_not_pruned(root: str, tmp_path: Path):
    parent = make_run(root)
    run = fork(parent, 3)
    assert run.parent and run.parent.rebuilt
    start = Version(run.parent.sync, run.parent.attempt)
    (tmp_path / "weights").write_bytes(b"x")
    Checkpoints(run).save(*start, step=6, folder=tmp_path)
    go_on(run, 3)
    for sync, attempt in ((3, 3), (4, 3)):
        for key in (layout.draws(sync, attempt), layout.steps(sync, attempt)):
            if not run.store.exists(key):
                run.store.create(key, b"")
    Checkpoints(run).prune(1)
    assert start in Checkpoints(run).complete()
