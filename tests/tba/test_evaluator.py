import pytest

from tba.config import preset
from tba.evaluator import Evaluator
from tba.types import Score, Version
from tests import fakes

V0 = Version(0, 1)


class Evaluations:
    def __init__(self) -> None:
        self.written: list[Score] = []

    def write(self, scores: list[Score]) -> None:
        self.written += scores

    def done(self) -> set[Version]:
        return {score.version for score in self.written}


def evaluator(*newest: Version, every: int = 10, samples: int = 2) -> tuple[Evaluator, Evaluations]:
    config = preset("quickstart").replace(
        {"evaluation.every": every, "evaluation.samples": samples, "training.steps": 40, "sync.every": 2}
    )
    evaluations = Evaluations()
    role = Evaluator(
        config,
        prompts=fakes.make_prompts(5),
        task=fakes.Task(),
        generator=fakes.Generator(),
        versions=fakes.Versions(*newest),
        evaluations=evaluations,
        lease=fakes.Lease(),
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
