"""Looks for versions in the background, in a real thread. The tests decide when a look ends or fails."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import fakes
from tba.errors import Damaged, Missing, Stopped, StorageError
from tba.search.prompt_stream import PromptStream
from tba.search.searcher import Searcher
from tba.search.version_watcher import FetchedVersion, VersionWatcher
from tba.types import Version
from tests.support.tba.searchers import searcher_config

V0, V1, V2, V3 = (Version(number, 1) for number in range(4))


class Gated(fakes.Versions):
    """Blocks every load except of version 0 until `gate` is open."""

    def __init__(self, *newest: Version, broken: dict[Version, Exception] | None = None):
        super().__init__(*newest, broken=broken)
        self.gate, self.asked = threading.Event(), threading.Event()

    def load(self, version: Version) -> Path:
        if version != V0:
            self.asked.set()
            assert self.gate.wait(20.0)
        return super().load(version)


def threads() -> list[str]:
    return [it.name for it in threading.enumerate() if it.name.startswith("version-watcher")]


@pytest.fixture
def watchers() -> Iterator[Callable[..., VersionWatcher]]:
    made: list[VersionWatcher] = []

    def make(*arguments: Any) -> VersionWatcher:
        made.append(VersionWatcher(*arguments))
        return made[-1]

    yield make
    for watcher in made:
        watcher.close()
    assert not threads()


def test_one_look_is_made_at_a_time_and_finds_the_newest(watchers: Callable[..., VersionWatcher]):
    versions = Gated(V0, V1)
    watcher = watchers(versions)
    watcher.begin_look(after=None)
    assert watcher.pop_found(wait=True) == FetchedVersion(V0, Path(str(V0)))
    watcher.begin_look(after=V0)
    assert versions.asked.wait(20.0) and watcher.pop_found() is None
    versions.queue += [V2, V3]
    for _ in range(9):
        watcher.begin_look(after=V0)
    assert versions.seen == [V0, V1] and watcher.pop_found() is None
    versions.queue = [V3]
    versions.gate.set()
    watcher.wait()
    watcher.begin_look(after=V0)
    assert watcher.pop_found(wait=True) == FetchedVersion(V1, Path(str(V1))) and watcher.pop_found() is None
    watcher.begin_look(after=V1)
    assert watcher.pop_found(wait=True) == FetchedVersion(V3, Path(str(V3))) and versions.loaded == [V0, V1, V3]


@pytest.mark.parametrize(("after", "refused"), [(V1, None), (V2, None), (V0, V1), (Version(0, 2), None)])
def test_what_is_known_or_refused_is_not_fetched(
    after: Version, refused: Version | None, watchers: Callable[..., VersionWatcher]
):
    watcher = watchers(versions := fakes.Versions(V1))
    watcher.begin_look(after=after, refused=refused)
    assert watcher.pop_found(wait=True) is None and versions.seen == [V1] and not versions.loaded


def test_a_folder_is_read_ahead_in_the_same_thread_once_it_is_there(watchers: Callable[..., VersionWatcher]):
    read: list[tuple[Path, str]] = []
    versions = fakes.Versions(V0, V1, broken={V1: Damaged("model.safetensors")})
    watcher = watchers(versions, lambda folder: read.append((folder, threading.current_thread().name)))
    for after in (None, V0):
        watcher.begin_look(after=after)
        watcher.pop_found(wait=True)
    assert [folder for folder, _ in read] == [Path(str(V0))] and read[0][1].startswith("version-watcher")


def test_a_version_that_is_gone_or_damaged_is_told_and_every_other_error_raised(
    watchers: Callable[..., VersionWatcher],
):
    errors = {V0: Missing("pruned"), V1: Damaged("model.safetensors"), V2: StorageError("no store")}
    watcher = watchers(fakes.Versions(*errors, broken=errors))
    for version in (V0, V1):
        watcher.begin_look(after=None)
        assert watcher.pop_found(wait=True) == FetchedVersion(version, errors[version])
    watcher.begin_look(after=None)
    with pytest.raises(StorageError, match="no store"):
        watcher.pop_found(wait=True)
    for call in (watcher.pop_found, lambda: watcher.begin_look(after=None)):
        with pytest.raises(StorageError, match="no store"):
            call()


def test_who_closes_waits_for_the_look_and_may_look_again(watchers: Callable[..., VersionWatcher]):
    watcher = watchers(versions := Gated(V1))
    watcher.begin_look(after=None)
    assert versions.asked.wait(20.0)
    threading.Timer(0.05, versions.gate.set).start()
    watcher.close()
    assert versions.loaded == [V1] and not threads() and watcher.pop_found() is None
    watcher.begin_look(after=None)
    assert watcher.pop_found(wait=True) == FetchedVersion(V1, Path(str(V1)))


def searcher(
    versions: fakes.Versions, stop_when: Callable[[Searcher, fakes.Log], bool], **changes: Any
) -> tuple[Searcher, fakes.Generator, fakes.Log]:
    generator, log = fakes.Generator(), fakes.Log()
    role = Searcher(
        0,
        searcher_config(prompts_per_round=3, responses_per_prompt=2, **changes),
        stream=PromptStream(fakes.make_prompts(30), seed=7, searcher=0, searchers=1, shuffle=False),
        task=fakes.Task(),
        generator=generator,
        scorer=fakes.Scorer(),
        reference=V0,
        log=log,
        versions=versions,
        lease=fakes.Lease(stop_when=lambda: stop_when(role, log)),
        events=fakes.Events(),
    )
    return role, generator, log


@pytest.mark.parametrize("updates_in_flight", [False, True])
def test_a_searcher_goes_on_while_a_version_is_fetched_and_takes_it_once_it_is_there(updates_in_flight: bool):
    versions = Gated(V0, V1)

    def enough(role: Searcher, log: fakes.Log) -> bool:
        if len(log.shards) >= 5 and versions.asked.is_set():
            versions.gate.set()
        return bool(log.shards) and log.shards[len(log.shards) - 1][-1].version_start == V1

    role, generator, log = searcher(versions, enough, updates_in_flight=updates_in_flight)
    with pytest.raises(Stopped):
        role.run()
    assert generator.adopted == [V0, V1] == versions.loaded and not threads()
    assert all(it.version_end == V0 for seq in range(5) for it in log.shards[seq])
    assert isinstance(role.adoption.events, fakes.Events) and role.adoption.events.kinds == ["version-adopted"] * 2


def test_what_goes_wrong_beside_a_searcher_ends_it():
    versions = fakes.Versions(V0, V1, broken={V1: StorageError("no store")})
    role, generator, _ = searcher(versions, lambda role, log: False)
    with pytest.raises(StorageError, match="no store"):
        role.run()
    assert generator.adopted == [V0] and not threads()


@pytest.mark.parametrize(
    ("trouble", "kind"), [(Damaged("model.safetensors"), "version-refused"), (Missing("gone"), "version-passed-over")]
)
def test_a_version_that_cannot_be_fetched_is_reported_by_the_searcher_which_goes_on(trouble: Exception, kind: str):
    versions, after = Gated(V0, V1, broken={V1: trouble}), list[int]()
    versions.gate.set()

    def enough(role: Searcher, log: fakes.Log) -> bool:
        assert isinstance(role.adoption.events, fakes.Events)
        if kind in role.adoption.events.kinds:
            versions.queue = [V0]
            after.append(len(log.shards))
        return bool(after) and len(log.shards) > after[0] + 20

    role, generator, _ = searcher(versions, enough)
    with pytest.raises(Stopped):
        role.run()
    assert generator.adopted == [V0] and versions.loaded[:2] == [V0, V1] and not threads()
    assert isinstance(role.adoption.events, fakes.Events) and set(role.adoption.events.kinds[1:]) == {kind}


def test_a_searcher_that_goes_in_step_looks_for_nothing_beside():
    role, generator, _ = searcher(versions := fakes.Versions(V0), lambda role, log: len(log.shards) > 2, lag=9)
    versions.seen = [V0]
    with pytest.raises(Stopped):
        role.run()
    assert generator.adopted == versions.seen == [V0] and not threads()


def test_in_step_the_next_version_is_fetched_while_the_round_before_is_generated(monkeypatch: pytest.MonkeyPatch):
    """With a lag of 1, version 0 generates rounds 0 and 1, and version 1 generates round 2."""
    loaded_in: list[str] = []

    class Named(Gated):
        def load(self, version: Version) -> Path:
            loaded_in.append(threading.current_thread().name)
            return super().load(version)

    versions = Named(V1)
    versions.seen = [V0, V1]
    role, generator, log = searcher(versions, lambda _, log: len(log.shards) == 3, lag=1)
    step = generator.step

    def step_of_round() -> Any:
        ended = step()
        if ended and len(log.shards) == 1:  # the last step of round 1
            assert versions.asked.wait(20.0) and generator.adopted == [V0]
            versions.gate.set()
        return ended

    monkeypatch.setattr(generator, "step", step_of_round)
    with pytest.raises(Stopped):
        role.run()
    assert [log.shards[round][0].version_start for round in range(3)] == [V0, V0, V1]
    assert versions.loaded == [V0, V1]  # each once
    assert loaded_in[1].startswith("version-watcher")
