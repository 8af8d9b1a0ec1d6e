from collections import Counter

import pytest

from tba.config import SearchConfig
from tba.errors import Damaged, DeadlinePassed, Missing, Stopped
from tba.searcher import PromptStream, Searcher, await_reference, request_seed
from tba.types import Version
from tests import fakes

V0, V1, V2 = Version(0, 1), Version(1, 1), Version(2, 1)


def stream(n: int = 12, *, searcher: int = 0, searchers: int = 1, shuffle: bool = True) -> PromptStream:
    prompts = fakes.make_prompts(n)
    return PromptStream(prompts, seed=7, searcher=searcher, searchers=searchers, shuffle=shuffle)


def ids(stream: PromptStream, rounds: range, size: int) -> list[str]:
    return [p.prompt_id for round in rounds for p in stream.take(round, size)]


@pytest.mark.parametrize("searchers", [1, 3])
def test_together_searchers_visit_every_prompt_once_in_each_pass(searchers):
    passes = Counter(
        prompt
        for i in range(searchers)
        for prompt in ids(stream(searcher=i, searchers=searchers), range(6), 12 // searchers // 2)
    )
    assert set(passes.values()) == {3} and len(passes) == 12


def test_a_restarted_searcher_takes_the_same_prompts():
    assert ids(stream(), range(9), 5)[20:] == ids(stream(), range(4, 9), 5)


def test_passes_differ_in_order_unless_shuffling_is_off():
    shuffled, plain = ids(stream(), range(2), 12), ids(stream(shuffle=False), range(2), 12)
    assert shuffled[:12] != shuffled[12:] and sorted(shuffled[:12]) == sorted(shuffled[12:])
    assert plain == [f"p{i}" for i in range(12)] * 2


def test_a_round_never_asks_for_more_prompts_than_there_are():
    assert len(stream(3).take(0, 8)) == 3


def test_request_seeds_do_not_repeat_and_fit_a_signed_column():
    seeds = {request_seed(0, s, r, i) for s in range(3) for r in range(10) for i in range(50)}
    assert len(seeds) == 1500 and max(seeds) < 2**63


def searcher(
    versions: fakes.Versions, log: fakes.Log, *, rounds: int
) -> tuple[Searcher, fakes.Generator, fakes.Events]:
    generator, events = fakes.Generator(), fakes.Events()
    config = SearchConfig(responses_per_prompt=4, prompts_per_round=3, temperature=0.7)
    role = Searcher(
        2,
        seed=7,
        config=config,
        stream=stream(),
        task=fakes.Task(),
        generator=generator,
        scorer=fakes.Scorer(),
        log=log,
        versions=versions,
        lease=fakes.Lease(stop_at=rounds + 1),
        events=events,
    )
    return role, generator, events


def test_a_round_becomes_one_shard_of_scored_trajectories():
    log = fakes.Log()
    role, _, _ = searcher(fakes.Versions(V0), log, rounds=1)
    with pytest.raises(Stopped):
        role.run()
    shard = log.rounds[0]
    assert [t.slot for t in shard] == list(range(12))
    assert len({t.group_id for t in shard}) == 3
    assert all(t.version_start == V0 and t.reference_version == V0 and t.searcher == 2 for t in shard)
    assert {t.reward for t in shard} == {0.0, 1.0}
    assert all(len(t.response_tokens) == len(t.behaviour_logps) == len(t.ref_logps) for t in shard)


def test_the_newest_version_is_adopted_once_at_the_next_round():
    role, generator, _ = searcher(fakes.Versions(V0, V0, V2), log := fakes.Log(), rounds=4)
    with pytest.raises(Stopped):
        role.run()
    assert generator.adopted == [V0, V2]
    assert [log.rounds[r][0].version_start for r in range(4)] == [V0, V0, V2, V2]


def test_a_damaged_version_is_reported_and_the_old_one_kept():
    versions = fakes.Versions(V0, V1, broken={V1: Damaged("model.safetensors")})
    role, generator, events = searcher(versions, log := fakes.Log(), rounds=3)
    with pytest.raises(Stopped):
        role.run()
    assert generator.adopted == [V0] and "version-refused" in events.kinds
    assert log.rounds[2][0].version_start == V0


def test_a_version_pruned_while_it_was_read_is_passed_over():
    versions = fakes.Versions(V0, V1, V2, broken={V1: Missing("pruned")})
    role, generator, _ = searcher(versions, fakes.Log(), rounds=3)
    with pytest.raises(Stopped):
        role.run()
    assert generator.adopted == [V0, V2]


def test_a_restarted_searcher_goes_on_with_the_next_round_and_the_same_seeds():
    whole, rest = fakes.Log(), fakes.Log(stored=2)
    for log, rounds in ((whole, 4), (rest, 2)):
        with pytest.raises(Stopped):
            searcher(fakes.Versions(V0), log, rounds=rounds)[0].run()
    assert sorted(rest.rounds) == [2, 3]
    assert [(t.prompt_id, t.seed) for t in rest.rounds[3]] == [(t.prompt_id, t.seed) for t in whole.rounds[3]]


def test_waiting_for_the_first_version_has_a_deadline_that_says_what_is_missing():
    versions = fakes.Versions(V0)
    versions.reference = lambda: None
    with pytest.raises(DeadlinePassed, match="version 0"):
        await_reference(versions, fakes.Lease(), deadline=0.05, poll=0.01)
