"""The weights of residuals: each in closed form, and what holds for all of them."""
# Shapes: P prompts, K responses per prompt.

import math
from typing import get_args

import pytest
import torch

from tba.objectives.trajectory_balance import Weights
from tba.objectives.weights import WEIGHTS
from tba.objectives.weights.mean_ratio import mean_ratio
from tba.objectives.weights.ratio import ratio
from tba.objectives.weights.second_moment import second_moment

LOG_RATIO_PK = torch.tensor([[-2.0, 0.0, 0.5, 1.0], [-100.0, -100.0, 100.0, -50.0]], dtype=torch.float64)
TOKENS_PK = torch.tensor([[4, 1, 2, 5], [10, 0, 10, 50]])


def test_the_setting_has_equal_weights_and_all_others():
    assert set(get_args(Weights)) == {"equal", *WEIGHTS}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("cap", [1e-6, 1.0, 1e6])
def test_weights_are_finite_and_some_weight_of_each_group_is_positive(name: str, cap: float):
    for dtype in (torch.float32, torch.float64):
        weight_PK = WEIGHTS[name](LOG_RATIO_PK.to(dtype), TOKENS_PK, cap)
        assert weight_PK.shape == LOG_RATIO_PK.shape and weight_PK.dtype == dtype
        assert weight_PK.isfinite().all() and (weight_PK >= 0).all() and (weight_PK.amax(dim=1) > 0).all()


@pytest.mark.parametrize("name", WEIGHTS)
def test_on_policy_all_weights_are_1(name: str):
    assert (WEIGHTS[name](torch.zeros(2, 4), TOKENS_PK, 1.0) == 1).all()


def test_ratio_is_that_of_the_whole_response_up_to_the_cap():
    found_K = ratio(LOG_RATIO_PK[:1], TOKENS_PK[:1], 1.2)[0].tolist()
    assert found_K == pytest.approx([math.exp(-2), 1.0, 1.2, 1.2])


def test_mean_ratio_is_the_geometric_mean_over_tokens_up_to_the_cap():
    found_K = mean_ratio(LOG_RATIO_PK[:1], TOKENS_PK[:1], 1.25)[0].tolist()
    assert found_K == pytest.approx([math.exp(-0.5), 1.0, 1.25, math.exp(0.2)])


@pytest.mark.parametrize(
    ("cap", "stay"),
    [(0.0, [0, 1, 0, 0]), (0.125, [0, 1, 1, 0]), (0.5, [0, 1, 1, 1]), (1.3, [0, 1, 1, 1]), (1.4, [1, 1, 1, 1])],
)
def test_second_moment_leaves_out_the_responses_whose_ratios_are_furthest_from_1(cap: float, stay: list[int]):
    """The squares are 4, 0, 0.25 and 1; their means, from the smallest on, 0, 0.125, 0.417 and 1.3125."""
    assert second_moment(LOG_RATIO_PK[:1], TOKENS_PK[:1], cap)[0].tolist() == stay


def test_second_moment_treats_equal_squares_alike():
    log_ratio_PK = torch.tensor([[0.1, -0.5, 0.5, 0.0]])
    assert second_moment(log_ratio_PK, TOKENS_PK[:1], 0.1)[0].tolist() == [1, 0, 0, 1]
    assert second_moment(log_ratio_PK, TOKENS_PK[:1], 0.13)[0].tolist() == [1, 1, 1, 1]
