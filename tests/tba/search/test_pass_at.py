"""pass@k: the chance that at least one of k responses is right, estimated from any number of samples."""

from fractions import Fraction
from itertools import combinations
from math import comb

import pytest

from benchmarks.harness import fakes
from tba.search.evaluator import pass_at
from tba.types import Version
from tests.support.tba.evaluators import evaluator


def test_pass_at_k_is_the_mean_over_prompts_of_the_share_of_k_responses_with_a_right_one():
    role, evaluations = evaluator(Version(20, 1), samples=5, pass_at=[1, 3, 5])
    role.run(poll=0)
    scores = {s.metric: s for s in evaluations.written if s.version.number == 20}
    assert isinstance(role.generator, fakes.Generator)
    seeds = role.generator.asked[-5:]  # of the sampled responses to each prompt; the fake is right for odd ones
    assert len({sum(seed % 2 for seed in row) for row in seeds}) > 1
    for k in (1, 3, 5):
        shares = [sum(any(s % 2 for s in some) for some in combinations(row, k)) / comb(5, k) for row in seeds]
        assert scores[f"pass@{k}"].value == pytest.approx(sum(shares) / 5)
        assert scores[f"pass@{k}"].n == 5
    assert scores["pass@1"].value == pytest.approx(scores["sampled"].value)
    assert scores["sampled"].n == 25
    assert len(role.generator.settings) == 4  # greedy and sampled of two versions: pass@k asks for nothing more


@pytest.mark.parametrize(("solved_at", "value"), [(0.0, 1.0), (1.5, 0.0)])
def test_a_response_is_right_from_a_given_reward_on(solved_at: float, value: float):
    role, evaluations = evaluator(Version(20, 1), pass_at=[1, 2], solved_at=solved_at)
    role.run(poll=0)
    assert [s.value for s in evaluations.written if s.metric in ("pass@1", "pass@2")] == [value] * 4
    assert all(0 < s.value < 1 for s in evaluations.written if s.metric == "sampled")  # still a mean of rewards


def test_pass_at_k_is_exactly_the_share_of_all_choices_of_k():
    for n in range(1, 8):
        for right in range(n + 1):
            responses = [i < right for i in range(n)]
            for k in range(1, n + 1):
                chosen = [any(some) for some in combinations(responses, k)]
                assert pass_at(k, n=n, right=right) == float(Fraction(sum(chosen), len(chosen)))


@pytest.mark.parametrize("n", [1, 4, 1024])
def test_with_none_right_the_chance_is_zero_with_all_right_one_and_choosing_all_finds_any(n: int):
    assert {pass_at(k, n=n, right=0) for k in (1, n)} == {0.0}
    assert {pass_at(k, n=n, right=n) for k in (1, n)} == {1.0}
    assert pass_at(n, n=n, right=1) == 1.0


def test_the_chance_rises_with_k_and_with_the_right_ones():
    n = 1000
    for right in (1, 2, 20):
        chances = [pass_at(k, n=n, right=right) for k in (1, 2, 10, 100, 499, 500)]
        assert chances == sorted(set(chances))
    chances = [pass_at(10, n=n, right=right) for right in range(0, 200, 10)]
    assert chances == sorted(set(chances))
    assert pass_at(500, n=n, right=1) == 0.5  # binomials overflow floats here


@pytest.mark.parametrize("chance", [Fraction(1, 100), Fraction(1, 3), Fraction(9, 10)])
def test_pass_at_k_is_without_bias_whatever_the_number_of_samples(chance: Fraction):
    """Its expectation is the probability that at least one of k is right, 1 - (1 - p)^k."""
    k = 3
    for n in (3, 4, 16):
        likely = [comb(n, right) * chance**right * (1 - chance) ** (n - right) for right in range(n + 1)]
        mean = sum(float(weight) * pass_at(k, n=n, right=right) for right, weight in enumerate(likely))
        assert mean == pytest.approx(float(1 - (1 - chance) ** k), rel=1e-12)
