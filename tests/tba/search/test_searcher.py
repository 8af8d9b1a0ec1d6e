import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest

from benchmarks.harness import fakes
from tba.config import SearchConfig
from tba.errors import Damaged, DeadlinePassed, Missing, RunFailed, Stopped
from tba.search.prompt_stream import PromptStream
from tba.search.round_requests import sampling_of_round
from tba.search.searcher import Searcher, await_reference
from tba.search.version_adoption import LOOK_EVERY
from tba.search.waiting_shards import MOST
from tba.types import Prompt, Reward, Trajectory, Version
from tests.support.tba.searchers import searcher_config
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("looks_take_no_time")
V0, V1, V2 = Version(0, 1), Version(1, 1), Version(2, 1)


def searcher(
    versions: fakes.Versions,
    log: fakes.Log,
    *,
    rounds: int,
    deadline: float = 60.0,
    changes: Mapping[str, Any] = MappingProxyType({}),
    lag: int | None = None,
    updates_in_flight: bool = False,
) -> tuple[Searcher, fakes.Generator, fakes.Events]:
    """Return a searcher that is asked to stop after a number of rounds."""
    generator, events, stored = fakes.Generator(), fakes.Events(), len(log.shards)
    search = {"responses_per_prompt": 4, "prompts_per_round": 3, "temperature": 0.7, "top_p": 0.9, **changes}
    role = Searcher(
        2,
        searcher_config(deadline=deadline, lag=lag, updates_in_flight=updates_in_flight, **search),
        stream=PromptStream(fakes.make_prompts(12), seed=7, searcher=0, searchers=1, shuffle=True),
        task=fakes.Task(),
        generator=generator,
        scorer=fakes.Scorer(),
        reference=V0,
        log=log,
        versions=versions,
        lease=fakes.Lease(stop_when=lambda: len(log.shards) >= stored + rounds),
        events=events,
    )
    return role, generator, events


def test_a_round_becomes_one_shard_of_scored_trajectories():
    log = fakes.Log()
    role, _, _ = searcher(fakes.Versions(V0), log, rounds=1)
    with pytest.raises(Stopped):
        role.run()
    shard = log.shards[0]
    assert [t.slot for t in shard] == list(range(12))
    assert len({t.group_id for t in shard}) == 3
    assert all(t.version_start == V0 and t.reference_version == V0 and t.searcher == 2 for t in shard)
    assert {t.reward for t in shard} == {0.0, 1.0}
    assert all(len(t.response_tokens) == len(t.behaviour_logps) == len(t.ref_logps or ()) for t in shard)


def test_the_newest_version_is_adopted_once_at_the_next_round():
    role, generator, _ = searcher(fakes.Versions(V0, V0, V2), log := fakes.Log(), rounds=4)
    with pytest.raises(Stopped):
        role.run()
    assert generator.adopted == [V0, V2]
    assert [log.shards[r][0].version_start for r in range(4)] == [V0, V0, V2, V2]


@pytest.mark.parametrize("lag", [None, 0])
def test_a_shard_is_stored_only_after_the_version_that_generated_it(lag: int | None):
    versions = fakes.Versions(V0, V1)
    versions.missing, versions.seen = {V0: 2, V1: 2}, [V0, V1]

    class Log(fakes.Log):
        def append(self, searcher: int, seq: int, trajectories: Sequence[Trajectory]) -> str:
            assert all(versions.missing[it.version_end] < 0 for it in trajectories)
            return super().append(searcher, seq, trajectories)

    role, _, _ = searcher(versions, log := Log(), rounds=2, lag=lag)
    with pytest.raises(Stopped):
        role.run()
    assert [log.shards[r][0].version_start for r in range(2)] == [V0, V1]


def test_rounds_go_on_while_shards_wait_and_shards_keep_their_order():
    versions, log = fakes.Versions(V0), fakes.Log()
    versions.missing = {V0: math.inf}
    role, generator, _ = searcher(versions, log, rounds=1)
    role.progress.lease = fakes.Lease(stop_when=lambda: len(generator.asked) >= 12)
    with pytest.raises(Stopped):
        role.run()
    assert not log.shards
    versions.missing = {}
    until(lambda: role.append_stored() or log.shards.get(2), "the shards are stored")
    assert [shard[0].round for _, shard in sorted(log.shards.items())] == [0, 1, 2]


def test_a_version_that_is_never_stored_has_a_deadline():
    versions = fakes.Versions(V0)
    versions.missing, versions.seen = {V0: math.inf}, [V0]
    role, _, _ = searcher(versions, fakes.Log(), rounds=10**6, lag=0, deadline=0.1)
    with pytest.raises(RunFailed, match=f"version {V0}, with which .*not been stored for 0.1 s"):
        role.run()
    assert "until version" in role.progress.lease.told[-1]


def test_no_round_begins_while_many_shards_wait():
    versions = fakes.Versions(V0)
    versions.missing = {V0: math.inf}
    role, generator, _ = searcher(versions, fakes.Log(), rounds=10**6, deadline=0.5)
    with pytest.raises(RunFailed):
        role.run()
    assert len(generator.asked) == 3 * MOST


@pytest.mark.parametrize("updates_in_flight", [True, False])
def test_a_version_that_appears_while_a_round_is_in_the_making_is_adopted_then_if_that_is_wanted(
    updates_in_flight: bool, monkeypatch: pytest.MonkeyPatch
):
    """The generator answers at its second step. If the version is adopted in flight, its responses come from V2."""
    monkeypatch.setattr("tba.search.version_adoption.LOOK_EVERY", 0.0)
    versions = fakes.Versions(V0, V2)
    role, generator, _ = searcher(versions, log := fakes.Log(), rounds=2, updates_in_flight=updates_in_flight)
    with pytest.raises(Stopped):
        role.run()
    assert generator.adopted == [V0, V2]
    assert [log.shards[r][0].version_start for r in range(2)] == [V2 if updates_in_flight else V0, V2]


def test_a_version_is_looked_for_once_a_second_while_responses_are_in_the_making():
    role, generator, _ = searcher(fakes.Versions(V0, V1, V2), fakes.Log(), rounds=1, updates_in_flight=True)
    role.adoption.await_first()
    role.ask(role.rounds.take())
    generator.step = list
    for adopted in ([V0], [V0, V1], [V0, V1, V2]):
        for _ in range(100):
            role.step()
        assert generator.adopted == adopted, "another look was too soon"
        role.adoption.looked -= LOOK_EVERY


def test_no_version_older_than_the_one_in_use_is_adopted_when_a_listing_is_behind():
    """Versions are ordered by attempt first: a version of a new trainer is newer, whatever its number."""
    resumed = Version(1, 2)
    versions = fakes.Versions(V0, V2, V1, resumed, V2)
    role, generator, events = searcher(versions, log := fakes.Log(), rounds=5)
    with pytest.raises(Stopped):
        role.run()
    assert generator.adopted == versions.loaded == [V0, V2, resumed]
    assert [log.shards[r][0].version_start for r in range(5)] == [V0, V2, V2, resumed, resumed]
    assert events.kinds == ["version-adopted"] * 3


@pytest.mark.parametrize("lag", [0, 2])
def test_in_step_each_round_is_by_the_version_that_it_has_to_be_by(lag):
    """Newer versions already exist. If two attempts have the version, that of the newer attempt counts."""
    again = Version(2, 2)
    role, generator, _ = searcher(fakes.Versions(V2), log := fakes.Log(), rounds=3, lag=lag)
    role.adoption.versions.seen = [V0, V1, V2, again]  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(Stopped):
        role.run()
    expected = [V0, V1, again] if lag == 0 else [V0, V0, V0, V1]
    assert [log.shards[r][0].version_start for r in range(len(log.shards))] == expected[: len(log.shards)]
    assert generator.adopted == list(dict.fromkeys(expected[: len(log.shards)]))
    assert len(log.shards) >= 1


def test_in_step_a_version_that_never_comes_is_waited_for_until_the_deadline():
    role, generator, _ = searcher(fakes.Versions(V2), log := fakes.Log(), rounds=10**6, lag=0, deadline=0.1)
    role.adoption.versions.seen = [V0, V2]  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(DeadlinePassed, match=r"no version 1 could be adopted for 0\.1 s \(limits\.data_deadline\)"):
        role.run()
    assert list(log.shards) == [0] and generator.adopted == [V0]


def test_in_step_a_fork_begins_with_the_version_it_starts_from():
    role, generator, _ = searcher(fakes.Versions(V2), log := fakes.Log({0: [], 1: [], 2: []}), rounds=1, lag=2)
    role.first_version = 2
    role.adoption.versions.seen = [V2]  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(Stopped):
        role.run()
    assert generator.adopted == [V2] and {it.round for it in log.shards[3]} == {3}


def test_generator_and_scorer_are_asked_at_the_temperature_of_search():
    role, generator, _ = searcher(fakes.Versions(V0), fakes.Log(), rounds=2)
    with pytest.raises(Stopped):
        role.run()
    assert generator.settings == [(0.7, 0.9)] * 2
    assert isinstance(role.assembly.scorer, fakes.Scorer) and role.assembly.scorer.temperatures == [0.7] * 2


def test_some_rounds_explore_and_their_scores_do_not():
    rounds = 400
    role, generator, _ = searcher(fakes.Versions(V0), fakes.Log(), rounds=rounds, changes={"explore_share": 0.3})
    with pytest.raises(Stopped):
        role.run()
    warmer = [temperature for temperature, _ in generator.settings if temperature != 0.7]
    other = [top_p for _, top_p in generator.settings if top_p != 0.9]
    both = [it for it in generator.settings if it[0] != 0.7 and it[1] != 0.9]
    error = math.sqrt(0.3 * 0.7 / rounds)
    assert abs(len(warmer) / rounds - 0.3) < 4 * error and abs(len(other) / rounds - 0.3) < 4 * error
    assert abs(len(both) / rounds - 0.09) < 4 * math.sqrt(0.09 * 0.91 / rounds)
    assert 0.7 < min(warmer) < 0.75 and 1.05 < max(warmer) < 1.1
    assert 0.7 < min(other) < 0.73 and 0.97 < max(other) < 1
    assert isinstance(role.assembly.scorer, fakes.Scorer) and set(role.assembly.scorer.temperatures) == {0.7}
    again = [sampling_of_round(round, role.config, seed=7, searcher=2) for round in range(rounds)]
    assert again == generator.settings


def test_rounds_that_explore_lie_between_the_temperatures_of_the_settings():
    explore: dict[str, Any] = {"explore_share": 0.5, "explore_temperature": (0.5, 2.0), "explore_top_p": 1.0}
    config = SearchConfig(temperature=0.7, top_p=0.9, **explore)
    settings = [sampling_of_round(round, config, seed=7, searcher=2) for round in range(400)]
    other = sorted(temperature for temperature, _ in settings if temperature != 0.7)
    assert abs(len(other) / 400 - 0.5) < 4 * 0.5 / math.sqrt(400)
    assert 0.5 <= other[0] < 0.55 and 1.95 < other[-1] <= 2.0
    assert abs(other[len(other) // 2] - 1.25) < 0.25
    assert {top_p for _, top_p in settings} == {0.9, 1.0}


@pytest.mark.parametrize(("remembered", "asked"), [(0, 2 * 12 * 4), (99, 12)])
def test_the_reward_of_a_response_that_is_remembered_is_not_asked_for_again(remembered: int, asked: int):
    """The searcher visits all prompts twice, and all responses to a prompt are equal."""
    changes = {"remembered_rewards": remembered}
    role, _, _ = searcher(fakes.Versions(V0), log := fakes.Log(), rounds=8, changes=changes)
    rewarded: list[Prompt] = []
    task = role.assembly.scoring.task
    task.reward = lambda prompt, response: rewarded.append(prompt) or Reward(value=float(prompt.answer))
    with pytest.raises(Stopped):
        role.run()
    assert len(rewarded) == asked
    assert {(t.prompt_id, t.reward) for shard in log.shards.values() for t in shard} == {
        (f"p{i}", float(i)) for i in range(12)
    }


def test_adoptions_are_events():
    role, _, events = searcher(fakes.Versions(V0, V0, V1), fakes.Log(), rounds=4)
    with pytest.raises(Stopped):
        role.run()
    assert events.kinds == ["version-adopted"] * 2


def test_a_damaged_version_is_reported_once_and_the_old_one_kept():
    versions = fakes.Versions(V0, V1, broken={V1: Damaged("model.safetensors")})
    role, generator, events = searcher(versions, log := fakes.Log(), rounds=9)
    with pytest.raises(Stopped):
        role.run()
    assert generator.adopted == [V0]
    assert events.kinds == ["version-adopted", "version-refused"] and versions.loaded == [V0, V1]
    assert log.shards[8][0].version_start == V0


def test_a_version_pruned_while_it_was_read_is_passed_over():
    versions = fakes.Versions(V0, V1, V2, broken={V1: Missing("pruned")})
    role, generator, events = searcher(versions, fakes.Log(), rounds=3)
    with pytest.raises(Stopped):
        role.run()
    assert generator.adopted == [V0, V2]
    assert events.kinds == ["version-adopted", "version-passed-over", "version-adopted"]


@pytest.mark.parametrize("trouble", [Missing("pruned"), Damaged("model.safetensors")])
def test_nothing_is_generated_before_a_version_could_be_adopted(trouble):
    versions = fakes.Versions(V0, V1, V2, broken={V0: trouble, V1: trouble})
    role, generator, events = searcher(versions, log := fakes.Log(), rounds=3)
    role.adoption.await_first(poll=0)
    assert generator.adopted == [V2] and len(events.kinds) == 3 and not log.shards


def test_the_wait_for_a_version_that_can_be_adopted_has_a_deadline_that_says_why():
    versions = fakes.Versions(V0, broken={V0: Damaged("model.safetensors")})
    role, _, events = searcher(versions, fakes.Log(), rounds=10**6, deadline=0.02)
    with pytest.raises(DeadlinePassed, match=f"no version could be adopted .*; {V0} is damaged"):
        role.adoption.await_first(poll=0.001)
    assert events.kinds == ["version-refused"]


def test_a_restarted_searcher_goes_on_with_the_next_round_and_the_same_seeds():
    whole = fakes.Log()
    with pytest.raises(Stopped):
        searcher(fakes.Versions(V0), whole, rounds=4)[0].run()
    rest = fakes.Log({seq: whole.shards[seq] for seq in range(2)})
    with pytest.raises(Stopped):
        searcher(fakes.Versions(V0), rest, rounds=2)[0].run()
    assert [(t.prompt_id, t.seed) for t in rest.shards[3]] == [(t.prompt_id, t.seed) for t in whole.shards[3]]


def test_waiting_for_the_first_version_has_a_deadline_that_says_what_is_missing():
    versions = fakes.Versions(V0)
    versions.reference = lambda: None  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(DeadlinePassed, match="version 0"):
        await_reference(versions, fakes.Lease(), deadline=0.05, poll=0.01)
