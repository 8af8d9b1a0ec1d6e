"""The posterior's accuracy, in closed form."""

import math

import pytest

from benchmarks.science.ceilings import posterior


@pytest.mark.parametrize("p", [1e-9, 0.02, 0.4, 0.999])
@pytest.mark.parametrize("beta", [0.05, 0.25, 1.0])
def test_the_posterior_weighs_right_answers_with_the_exponential_of_their_reward(p: float, beta: float):
    right = p * math.exp(1 / beta)
    assert posterior(math.log(p), beta) == pytest.approx(right / (1 - p + right), rel=1e-9)


def test_a_certain_answer_stays_certain_and_one_that_is_out_of_reach_stays_so():
    assert posterior(0.0, 0.25) == 1.0
    assert posterior(-700.0, 0.25) == pytest.approx(math.exp(4 - 700), rel=1e-9)
