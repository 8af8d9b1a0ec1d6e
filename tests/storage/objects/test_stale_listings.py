"""Listings that do not show the newest objects yet: nothing is overwritten, swept up or given up."""

import pytest

from storage import layout
from storage.log.trajectories import Trajectories
from storage.objects import manifest_folders
from storage.objects.store import Store
from storage.runs.attempts import newest_attempt
from storage.weights.attempt_claim import claim_attempt
from storage.weights.checkpoints import Checkpoints
from tba.types import Version
from tests.support.builders import make_shard
from tests.support.faults.faulty_store import Faulty
from tests.support.storage.synthetic import EVERY, SyntheticRun, fill


@pytest.fixture
def stale(bad: Faulty) -> Faulty:
    """Let listings hide objects that have just been created."""
    bad.proxy.operations = ("list",)
    bad.proxy.at_random(0, 1.0, ["stale"])
    return bad


def publish(store: Store, bad: Faulty, version: Version) -> None:
    (bad.folder / "weights").mkdir(exist_ok=True)
    fill(str(bad.folder / "weights"), str(version))
    manifest_folders.publish(store, layout.version(version), bad.folder / "weights", {})


def test_a_listing_may_be_older_than_what_was_created(stale: Faulty):
    stale.proxy.lag = 1
    stale.store.create("a/x", b"")
    stale.store.create("b/y", b"")
    assert [entry.key for entry in stale.store.list()] == ["a/x"]
    assert stale.store.folders() == ["a"]


def test_a_version_that_a_listing_does_not_show_yet_is_published_all_the_same(stale: Faulty):
    publish(stale.store, stale, Version(1, 1))
    assert manifest_folders.complete(stale.store, layout.VERSIONS) == []
    assert manifest_folders.complete(stale.behind, layout.VERSIONS) == [Version(1, 1)]


def test_a_version_whose_manifest_a_listing_does_not_show_yet_is_not_swept_up(stale: Faulty):
    publish(stale.store, stale, Version(1, 2))
    publish(stale.store, stale, Version(2, 1))
    stale.proxy.lag = 1
    found = manifest_folders.survey(stale.store, layout.VERSIONS)
    assert found.unfinished == manifest_folders.left_behind(stale.store, layout.VERSIONS, found) == [Version(2, 1)]
    assert manifest_folders.sweep(stale.store, layout.version(Version(2, 1)))
    assert manifest_folders.fetch(stale.behind, layout.version(Version(2, 1)), stale.folder / "copy")


def test_an_attempt_that_a_listing_does_not_show_yet_is_the_newest_all_the_same(stale: Faulty):
    run = SyntheticRun(stale.url, "first").run
    stale.proxy.lag = 1000
    assert [claim_attempt(run).number for _ in range(3)] == [1, 2, 3]
    assert newest_attempt(run) == 3


def test_a_checkpoint_of_an_attempt_that_a_listing_does_not_show_yet_is_not_given_up(bad: Faulty):
    run = SyntheticRun(bad.url, "first").run
    (bad.folder / "weights").mkdir()
    fill(str(bad.folder / "weights"), "a checkpoint")
    bad.proxy.operations, bad.proxy.lag = ("list",), 1000
    assert claim_attempt(run).number == 1
    Checkpoints(run).save(0, 1, 0, bad.folder / "weights")
    assert claim_attempt(run).number == 2
    for key in (layout.draws(1, 2), layout.steps(1, 2)):
        run.store.create(key, b"what it needs")
    Checkpoints(run).save(1, 2, EVERY, bad.folder / "weights")
    bad.proxy.plan = ["stale", *["pass"] * 20]  # the listing of attempts
    Checkpoints(run).prune(1)
    assert Checkpoints(run).complete() == [Version(1, 2)]


def test_a_round_that_a_listing_does_not_show_yet_is_not_taken_again(stale: Faulty):
    log = Trajectories(SyntheticRun(stale.url, "first").run)
    for round in range(3):
        assert log.next_seq(0) == round
        log.append(0, round, make_shard({"train/0": [1.0]}, round=round))
