"""Searchers with several open rounds: when groups are stored, and which version generated them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import fakes
from benchmarks.harness.tiny_models import tiny_folder
from tba.errors import Busy, Damaged, DeadlinePassed, Missing, Stopped
from tba.generation.transformers_generator import TransformersGenerator
from tba.interfaces import Generator, ReferenceScorer
from tba.models.policy import Policy, PolicyScorer
from tba.search.open_rounds import SHARDS_PER_ROUND
from tba.search.prompt_stream import PromptStream
from tba.search.searcher import Searcher
from tba.types import Prompt, Request, Response, Trajectory, Version
from tests.support.tba.searchers import searcher_config

pytestmark = pytest.mark.usefixtures("looks_take_no_time")
V0, V1, V2 = Version(0, 1), Version(1, 1), Version(2, 1)
SIZE = 3


class Slow(fakes.Generator):
    """Answers one request after the other, but requests for slow prompts only after a number of steps."""

    def __init__(self, slow: Mapping[str, int]):
        super().__init__()
        self.slow, self.begun, self.now = slow, list[tuple[int, Request, Version | None]](), 0

    def submit(self, requests: Sequence[Request]) -> None:
        super().submit(requests)
        self.begun += [(self.now + self.slow.get(it.prompt.prompt_id, 0), it, self.version) for it in requests]

    def step(self) -> list[tuple[Request, Response]]:
        self.now += 1
        if not (due := [entry for entry in self.begun if entry[0] <= self.now]):
            return []
        self.begun.remove(due[0])
        _, request, version_start = due[0]
        response = self.make_response(request.prompt, request.seed, request.temperature)
        assert version_start
        return [(request, replace(response, version_start=version_start))]


def search(
    versions: fakes.Versions,
    *,
    shards: int,
    generator: Generator | None = None,
    log: fakes.Log | None = None,
    scorer: ReferenceScorer | None = None,
    prompts: Sequence[Prompt] = tuple(fakes.make_prompts(30)),
    **changes: Any,
) -> tuple[Searcher, fakes.Log]:
    """Run a searcher that stops after a number of shards, and return it with its log."""
    log = log or fakes.Log()
    role = Searcher(
        2,
        searcher_config(prompts_per_round=SIZE, responses_per_prompt=2, **changes),
        stream=PromptStream(prompts, seed=7, searcher=0, searchers=1, shuffle=False),
        task=fakes.Task(),
        generator=generator or Slow({}),
        scorer=scorer or fakes.Scorer(),
        reference=V0,
        log=log,
        versions=versions,
        lease=fakes.Lease(stop_when=lambda: len(log.shards) >= shards),
        events=fakes.Events(),
    )
    with pytest.raises(Stopped):
        role.run()
    return role, log


def rounds_of(shard: Sequence[Trajectory]) -> list[int]:
    return [it.round for it in shard[::2]]


def test_a_long_response_holds_back_its_own_group_alone():
    _, log = search(fakes.Versions(V0), shards=3, generator=Slow({"p1": 16}), open_rounds=3)
    assert [[it.prompt_id for it in shard[::2]] for shard in log.shards.values()] == [
        ["p0", "p2", "p3"], ["p4", "p5", "p6"], ["p1", "p7", "p8"],
    ]  # fmt: skip
    assert [rounds_of(shard) for shard in log.shards.values()] == [[0, 0, 1], [1, 1, 2], [0, 2, 2]]
    _, log = search(fakes.Versions(V0), shards=3, generator=Slow({"p1": 16}))
    assert [rounds_of(shard) for shard in log.shards.values()] == [[0] * 3, [1] * 3, [2] * 3]


def test_of_more_groups_than_a_shard_takes_those_that_ended_first_are_stored_first():
    """All responses of three rounds end at the same moment, except one that ends last."""

    class Burst(fakes.Generator):
        def step(self) -> list[tuple[Request, Response]]:
            begun, self.thinking = [it for requests in self.thinking for it in requests], []
            late = [it for it in begun if it.prompt.prompt_id == "p0" and len(begun) > 2]
            self.thinking = [late] if late else []
            return [(it, self.make_response(it.prompt, it.seed, it.temperature)) for it in begun if it not in late]

    _, log = search(fakes.Versions(V0), shards=4, generator=Burst(), open_rounds=3)
    assert [[it.prompt_id for it in shard[::2]] for shard in log.shards.values()][:2] == [
        ["p1", "p2", "p3"], ["p4", "p5", "p6"],
    ]  # fmt: skip


def test_no_more_rounds_are_open_than_the_settings_say():
    generator = Slow({"p1": 100})
    role, log = search(fakes.Versions(V0), shards=2, generator=generator, open_rounds=2)
    role.progress.lease = fakes.Lease(stop_when=lambda: generator.now > 90)
    with pytest.raises(Stopped):
        role.run()
    assert max(it.round for shard in log.shards.values() for it in shard) == 1
    assert {row[0] for row in generator.begun if row[1].prompt.prompt_id != "p1"} == set()


def test_groups_have_their_name_rows_and_seeds_whichever_shard_they_are_in():
    _, streamed = search(fakes.Versions(V0), shards=9, generator=Slow({"p1": 16, "p8": 9, "p9": 20}), open_rounds=4)
    _, plain = search(fakes.Versions(V0), shards=9)

    def facts(log: fakes.Log) -> dict[str, list[Any]]:
        rows = [it for shard in log.shards.values() for it in shard]
        found: dict[str, list[Any]] = {}
        for it in rows:
            found.setdefault(it.group_id, []).append((it.round, it.slot, it.prompt_id, it.seed, it.response, it.reward))
        return found

    told, expected = facts(streamed), facts(plain)
    assert len(told) == 9 * SIZE and len(told.keys() & expected.keys()) >= 6 * SIZE
    assert all(told[name] == expected[name] for name in told.keys() & expected.keys())


def test_what_is_in_the_making_is_finished_by_its_version_and_a_newer_one_taken_then(monkeypatch: pytest.MonkeyPatch):
    """V1 appears while three rounds are in flight."""
    monkeypatch.setattr("tba.search.version_adoption.LOOK_EVERY", 0.0)
    generator = Slow({"p4": 30})
    role, log = search(fakes.Versions(V0, V0, V0, V1), shards=6, generator=generator, open_rounds=3)
    rows = [it for shard in log.shards.values() for it in shard]
    assert {(it.version_start, it.version_end) for it in rows} == {(V0, V0), (V1, V1)}
    assert generator.adopted == [V0, V1]
    by_round = {it.round: it.version_start for it in rows}
    assert [by_round[round] for round in range(5)] == [V0, V0, V0, V1, V1], "none begins while a newer version waits"
    assert all(by_round[a].order <= by_round[b].order for a, b in pairwise(sorted(by_round)))
    assert [len(shard) for shard in log.shards.values()] == [2 * SIZE] * 6, "no shard is cut short by an adoption"
    assert isinstance(role.adoption.versions, fakes.Versions) and role.adoption.versions.loaded == [V0, V1]


@pytest.mark.parametrize("trouble", [None, Missing("pruned"), Damaged("model.safetensors")])
def test_of_versions_that_come_while_one_waits_the_newest_that_can_be_fetched_is_taken(
    trouble: Exception | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tba.search.version_adoption.LOOK_EVERY", 0.0)
    broken = {V2: trouble} if trouble else {}
    versions, generator = fakes.Versions(V0, V0, V0, V1, V2, V0, broken=broken), Slow({"p4": 30})
    role, log = search(versions, shards=6, generator=generator, open_rounds=3)
    assert versions.loaded == [V0, V1, V2]
    assert generator.adopted == [V0, V1 if trouble else V2]
    assert {it.version_end for shard in log.shards.values() for it in shard} == {*generator.adopted}
    assert isinstance(role.adoption.events, fakes.Events) and len(role.adoption.events.kinds) == (3 if trouble else 2)


@pytest.mark.parametrize(("looks", "every"), [(1, 0.0), (4, 0.0), (1, 60.0)])
def test_in_flight_a_newer_version_is_taken_at_once_and_named(
    looks: int, every: float, monkeypatch: pytest.MonkeyPatch
):
    """V1 is found while all rounds are in flight, or when the first shard is complete."""
    monkeypatch.setattr("tba.search.version_adoption.LOOK_EVERY", every)
    generator = Slow({"p1": 8})
    versions = fakes.Versions(*[V0] * looks, V1)
    _, log = search(versions, shards=4, generator=generator, open_rounds=3, updates_in_flight=True)
    rows = [it for shard in log.shards.values() for it in shard]
    assert {(V0, V1)} < {(it.version_start, it.version_end) for it in rows} <= {(V0, V0), (V0, V1), (V1, V1)}


@pytest.mark.parametrize("open_rounds", [1, 3])
def test_a_version_of_another_model_is_taken_once_nothing_is_in_flight(
    open_rounds: int, monkeypatch: pytest.MonkeyPatch
):
    """V1 is found while the first rounds are in flight."""

    class Particular(Slow):
        tried_in_vain = 0

        def adopt(self, folder: Path, version: Version) -> None:
            if self.begun:
                self.tried_in_vain += 1
                raise Busy("another model")
            super().adopt(folder, version)

    monkeypatch.setattr("tba.search.version_adoption.LOOK_EVERY", 0.0)
    versions, generator = fakes.Versions(*[V0] * 5, V1), Particular({"p1": 12})
    role, log = search(versions, shards=6, generator=generator, open_rounds=open_rounds, updates_in_flight=True)
    assert generator.adopted == [V0, V1] == versions.loaded and generator.tried_in_vain == 1
    assert {(it.version_start, it.version_end) for shard in log.shards.values() for it in shard} == {(V0, V0), (V1, V1)}
    assert isinstance(role.adoption.events, fakes.Events) and role.adoption.events.kinds == ["version-adopted"] * 2


@pytest.mark.parametrize("open_rounds", [1, 3])
def test_so_many_rounds_are_begun_with_a_version_and_stored_before_the_next_is_waited_for(open_rounds: int):
    class Later(fakes.Versions):
        """Publishes the next version when the searcher has nothing left to do."""

        def newest(self) -> Version:
            if len(log.shards) >= 2 and not generator.begun:
                self.queue = [V1]
            return super().newest()

    generator, log = Slow({"p1": 12}), fakes.Log()
    search(Later(V0), shards=4, generator=generator, log=log, open_rounds=open_rounds, rounds_per_version=2)
    by_version: dict[Version, set[int]] = {}
    for it in (it for shard in log.shards.values() for it in shard):
        by_version.setdefault(it.version_start, set()).add(it.round)
    assert by_version == {V0: {0, 1}, V1: {2, 3}}


def test_a_version_that_never_comes_is_waited_for_until_the_deadline():
    log = fakes.Log()
    with pytest.raises(DeadlinePassed, match=rf"no version after {V0} for 0\.1 s \(limits\.data_deadline\)"):
        search(fakes.Versions(V0), shards=9, log=log, rounds_per_version=2, deadline=0.1)
    assert sorted(log.shards) == [0, 1]
    broken = fakes.Versions(V0, V1, broken={V1: Damaged("model.safetensors")})
    with pytest.raises(DeadlinePassed, match=f"no version after {V0} .*; {V1} is damaged"):
        search(broken, shards=9, rounds_per_version=2, deadline=0.1)


def test_all_that_has_ended_is_stored_before_a_version_is_waited_for():
    class AtOnce(fakes.Generator):
        def step(self) -> list[tuple[Request, Response]]:
            begun, self.thinking = [it for requests in self.thinking for it in requests], []
            return [(it, self.make_response(it.prompt, it.seed, it.temperature)) for it in begun]

    log = fakes.Log()
    with pytest.raises(DeadlinePassed):
        search(
            fakes.Versions(V0), shards=9, generator=AtOnce(), log=log, open_rounds=2, rounds_per_version=2, deadline=0.1
        )
    assert sorted(log.shards) == [0, 1]


def test_whoever_waits_for_a_version_hears_a_request_to_stop():
    role, _ = search(fakes.Versions(V0), shards=1, rounds_per_version=1, deadline=3.0)
    lease = role.progress.lease = fakes.Lease(stop_when=lambda: any("for a version after" in it for it in lease.told))
    with pytest.raises(Stopped):
        role.run()


def test_a_version_that_was_fetched_and_cannot_be_taken_holds_up_nothing_from_then_on():
    class Refusing(Slow):
        def adopt(self, folder: Path, version: Version) -> None:
            if version == V1:
                raise Damaged("model.safetensors")
            super().adopt(folder, version)

    role, log = search(fakes.Versions(*[V0] * 3, V1), shards=6, generator=Refusing({}), open_rounds=3)
    events = role.adoption.events
    assert isinstance(events, fakes.Events) and events.kinds == ["version-adopted", "version-refused"]
    assert {it.version_end for shard in log.shards.values() for it in shard} == {V0}
    rounds = {group.round for group, _ in role.in_flight.requests.values()}
    assert len(rounds) > 1, "rounds are in the making at once again"


def test_a_searcher_that_starts_again_asks_what_was_open_and_no_more():
    slow = {"p1": 300, "p5": 300}
    first, log = search(fakes.Versions(V0), shards=7, generator=Slow(slow), open_rounds=8)
    stored = {it.group_id for shard in log.shards.values() for it in shard}
    second, log = search(fakes.Versions(V1), shards=10, log=log, open_rounds=8)
    assert (first.progress.shards, second.progress.shards) == (7, 10)
    rows = [it for shard in log.shards.values() for it in shard]
    assert len({(it.round, it.slot) for it in rows}) == len(rows) == 10 * SIZE * 2
    later = {it.group_id: it.version_start for it in rows if it.group_id not in stored}
    assert {"2/0/p1", "2/1/p5"} <= later.keys() and set(later.values()) == {V1}


def test_where_the_newest_shards_cannot_be_read_it_goes_on_after_those_before():
    _, log = search(fakes.Versions(V0), shards=2)
    unread = {seq: [] for seq in range(2, 2 + 2 * SHARDS_PER_ROUND)}
    _, log = search(fakes.Versions(V0), shards=len(unread) + 3, log=fakes.Log({**log.shards, **unread}))
    assert rounds_of(log.shards[len(unread) + 2]) == [2] * SIZE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("policy") / "tiny")


def test_what_a_policy_says_does_not_depend_on_how_many_rounds_are_in_the_making(folder: Path):
    found = []
    for changes in ({}, {"open_rounds": 3}, {"open_rounds": 3, "batch_responses": 5}):
        generator = TransformersGenerator(
            device="cpu", batch_responses=changes.get("batch_responses", 64), max_response_tokens=16
        )
        versions = fakes.Versions(V0)
        versions.load = lambda version: folder  # pyright: ignore[reportAttributeAccessIssue]
        scorer = PolicyScorer(Policy.load(folder), V0)
        options = {"max_response_tokens": 16, "temperature": 3.0, **changes}
        _, log = search(versions, shards=8, generator=generator, scorer=scorer, **options)
        rows = [it for shard in log.shards.values() for it in shard]
        found.append({(it.round, it.slot): it for it in rows})
    plain, *streamed = found
    for log in streamed:
        common = sorted(plain.keys() & log.keys())
        assert len(common) >= 6 * SIZE * 2
        assert len({len(log[it].response_tokens) for it in common}) > 3
        for it in common:
            assert log[it].response_tokens == plain[it].response_tokens
            assert log[it].behaviour_logps == pytest.approx(plain[it].behaviour_logps, abs=1e-4)
            assert log[it].ref_logps == pytest.approx(plain[it].ref_logps, abs=1e-4)
