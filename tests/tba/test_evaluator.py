from collections.abc import Sequence
from pathlib import Path

import pytest

from tba.config import preset
from tba.errors import Damaged, Missing
from tba.evaluator import Evaluator
from tba.types import Score, Version
from tests import fakes

V0 = Version(0, 1)


class Evaluations:
    def __init__(self) -> None:
        self.written: list[Score] = []

    def write(self, scores: Sequence[Score]) -> None:
        self.written += scores

    def done(self) -> set[Version]:
        return {score.version for score in self.written}


def evaluator(
    *newest: Version, every: int = 10, samples: int = 2, broken: dict[Version, Exception] | None = None
) -> tuple[Evaluator, Evaluations]:
    config = preset("quickstart").replace(
        {
            "evaluation.every": every, "evaluation.samples": samples, "training.steps": 40, "sync.every": 2,
            "search.temperature": 0.7, "search.top_p": 0.9,
        }
    )  # fmt: skip
    evaluations = Evaluations()
    role = Evaluator(
        config,
        prompts=fakes.make_prompts(5),
        task=fakes.Task(),
        generator=fakes.Generator(),
        versions=fakes.Versions(*newest, broken=broken),
        evaluations=evaluations,
        lease=fakes.Lease(stop_at=1000),
        events=fakes.Events(),
    )
    return role, evaluations


def test_the_first_the_last_and_every_nth_version_are_scored_and_no_other():
    role, evaluations = evaluator(*(Version(n, 1) for n in (0, 1, 4, 9, 12, 15, 19, 20)), every=10)
    role.run(poll=0)
    assert sorted({s.version.number for s in evaluations.written}) == [0, 12, 20]


def test_the_start_is_scored_even_when_training_is_far_ahead():
    role, evaluations = evaluator(Version(20, 1))
    role.run(poll=0)
    assert [s.version.number for s in evaluations.written if s.metric == "greedy"] == [0, 20]


def test_scores_are_means_over_all_responses_of_all_prompts():
    role, evaluations = evaluator(Version(20, 1))
    role.run(poll=0)
    greedy, sampled = evaluations.written[:2]
    assert (greedy.metric, greedy.n, greedy.value) == ("greedy", 5, 0.0)  # the fake is right for odd seeds only
    assert (sampled.metric, sampled.n) == ("sampled", 10)
    assert sampled.value == pytest.approx(round(sampled.value * 10) / 10) and 0 < sampled.value < 1


def test_a_restarted_evaluator_scores_nothing_twice():
    role, evaluations = evaluator(Version(0, 1), Version(20, 1))
    role.run(poll=0)
    before = list(evaluations.written)
    role.run(poll=0)
    assert evaluations.written == before


def test_without_samples_only_the_greedy_score_is_kept():
    role, evaluations = evaluator(Version(20, 1), samples=0)
    role.run(poll=0)
    assert {s.metric for s in evaluations.written} == {"greedy"}


def scored(evaluations: Evaluations) -> list[int]:
    return [s.version.number for s in evaluations.written if s.metric == "greedy"]


def kinds(role: Evaluator) -> list[str]:
    assert isinstance(role.events, fakes.Events)
    return role.events.kinds


def test_greedy_is_at_temperature_zero_and_sampled_at_that_of_search():
    role, _ = evaluator(Version(20, 1))
    role.run(poll=0)
    assert isinstance(role.generator, fakes.Generator)
    assert role.generator.settings == [(0.0, 0.9), (0.7, 0.9)] * 2


def test_of_the_versions_there_are_those_that_are_kept_are_scored():
    """Pruning keeps each `every`-th: 10, where it was published, not 12, which happens to be the newest."""
    role, evaluations = evaluator(*(Version(n, 1) for n in (0, 9, 10, 12, 14, 19, 20)), every=10)
    versions = role.versions
    assert isinstance(versions, fakes.Versions)
    newest, versions.newest = versions.newest, lambda: (newest(), newest())[1]  # two are published between two looks
    role.run(poll=0)
    assert scored(evaluations) == [0, 10, 20]


def test_a_version_pruned_before_its_turn_is_passed_over_and_reported():
    role, evaluations = evaluator(*(Version(n, 1) for n in (0, 12, 13, 20)), broken={Version(12, 1): Missing("gone")})
    role.run(poll=0)
    assert scored(evaluations) == [0, 13, 20]
    assert kinds(role) == ["version-passed-over"]


def test_a_version_pruned_while_it_is_scored_is_scored():
    role, evaluations = evaluator(*(Version(n, 1) for n in (0, 12, 20)))
    load, steps = role.versions.load, dict[Version, bool]()

    def load_once(version: Version) -> Path:
        steps[version] = True
        return load(version)

    def step(version: Version) -> int:
        if version in steps:
            raise Missing("pruned while it was scored")
        return 2 * version.number

    role.versions.load, role.versions.step = load_once, step
    role.run(poll=0)
    assert [(s.version.number, s.step) for s in evaluations.written if s.metric == "sampled"] == [
        (0, 0), (12, 24), (20, 40),
    ]  # fmt: skip


def test_a_damaged_version_is_refused_once_and_the_next_one_scored():
    role, evaluations = evaluator(
        *(Version(n, 1) for n in (0, 10, 10, 10, 10, 11, 20)), broken={Version(10, 1): Damaged("model.safetensors")}
    )
    role.run(poll=0)
    assert scored(evaluations) == [0, 11, 20]
    assert kinds(role) == ["version-refused"]


def test_a_damaged_last_version_is_an_error_since_no_other_will_come():
    role, evaluations = evaluator(Version(20, 1), broken={Version(20, 1): Damaged("model.safetensors")})
    with pytest.raises(Damaged):
        role.run(poll=0)
    assert scored(evaluations) == [0]


def test_between_two_looks_the_evaluator_sleeps_whatever_it_found(monkeypatch):
    slept = []
    monkeypatch.setattr("tba.evaluator.time.sleep", slept.append)
    role, _ = evaluator(*(Version(n, 1) for n in (0, 10, 10, 10, 20)), broken={Version(10, 1): Missing("unreadable")})
    role.run(poll=1.5)
    assert slept == [1.5] * 3
