"""Corrections of importance ratios: what each kind does, at which level, and with which settings."""
# Shapes: P prompts, K responses per prompt, T tokens, N sequences of the toy of L tokens.

import math
from itertools import product
from typing import Any, get_args

import pytest
import torch
from pydantic import ValidationError

from benchmarks.harness import toy
from tba.objectives.policy_gradients.corrections import Correction
from tba.objectives.policy_gradients.grpo import GRPO
from tba.objectives.policy_gradients.policy_loss import policy_gradient
from tba.objectives.policy_gradients.rloo import RLOO, ProximalRLOO
from tba.types import CorrectionKind
from tests.support.tba.objective_examples import (
    BETA,
    GRADIENTS,
    OLD_NL,
    assert_close,
    given_tokens,
    gradient,
    groups_of,
    named,
    parameters,
)

KINDS = get_args(CorrectionKind)  # the first kind corrects nothing


# --- kinds ------------------------------------------------------------------------------------------------------------


def maximised(kind: Any, log_ratio: float, advantage: float, **chosen: Any) -> tuple[float, float]:
    """Return value and gradient at a token with probability e^-1 under the policy that sampled it."""
    logp = torch.tensor(log_ratio - 1.0, dtype=torch.float64, requires_grad=True)
    old, weight = torch.tensor(-1.0, dtype=torch.float64), torch.tensor(advantage, dtype=torch.float64)
    value = Correction(kind=kind, **chosen).maximised(logp, old, weight)
    return float(value.detach()), float(torch.autograd.grad(value, logp)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_on_policy_nothing_is_corrected(kind: str):
    for advantage in (-2.0, 0.5):
        assert maximised(kind, 0.0, advantage)[1] == pytest.approx(advantage)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_ratio_within_bounds_is_the_weight(kind: str):
    """The ratio of the decoupled kind is taken to the proximal policy, but its total weight is the same."""
    for log_ratio, advantage in product((-0.15, 0.15), (-2.0, 0.5)):
        assert maximised(kind, log_ratio, advantage)[1] == pytest.approx(advantage * math.exp(log_ratio))


def test_a_clipped_ratio_teaches_nothing_more_where_it_has_gone_far_enough():
    far, near = math.log(1.5), math.log(0.5)
    assert maximised("clip", far, 1.0) == pytest.approx((1.2, 0.0))
    assert maximised("clip", near, -1.0) == pytest.approx((-0.8, 0.0))
    assert maximised("clip", far, -1.0) == pytest.approx((-1.5, -1.5))
    assert maximised("clip", near, 1.0) == pytest.approx((0.5, 0.5))


def test_beyond_its_cap_a_ratio_is_cut_off_or_bounded():
    beyond = math.log(9.0)
    assert maximised("cap", beyond, 2.0, cap=8.0) == pytest.approx((16.0, 0.0))
    assert maximised("truncate", beyond, 2.0, cap=8.0)[1] == pytest.approx(16.0)
    assert maximised("cispo", beyond, 2.0)[1] == pytest.approx(2.4)
    assert maximised("cispo", -beyond, 2.0)[1] == pytest.approx(1.6)
    assert maximised("mask", beyond, 2.0, cap=8.0) == (0.0, 0.0)
    assert maximised("mask", -beyond, 2.0, cap=8.0) == (0.0, 0.0)
    for log_ratio in (0.0, 1.0, 5.0):
        assert abs(maximised("truncate", log_ratio, 1.0, cap=2.0)[1]) <= 2.0


def test_a_decoupled_correction_lies_between_clipping_and_reweighing():
    for log_ratio, advantage in product((-1.0, 0.1, 1.0), (-1.0, 1.0)):
        assert maximised("decoupled", log_ratio, advantage, prox_share=0.0) == pytest.approx(
            maximised("clip", log_ratio, advantage)
        )
        weight = math.exp(log_ratio)
        assert maximised("decoupled", log_ratio, advantage, prox_share=1.0)[1] == pytest.approx(weight * advantage)


# --- levels -----------------------------------------------------------------------------------------------------------


def test_a_ratio_of_means_is_the_geometric_mean_of_a_responses_tokens():
    """GSPO: ratios of short and long responses count the same."""
    mask_PKT = torch.arange(4) < torch.tensor([[2, 4]])[:, :, None]
    old_PKT = -toy.random_rewards(17, 1, 2, 4)
    logp_PKT = (old_PKT + 0.1).requires_grad_()
    gspo = RLOO(correction="clip", correction_level="mean")
    groups = given_tokens(logp_PKT, old_PKT, torch.tensor([[1.0, 0.0]], dtype=torch.float64), mask_PKT)
    advantage_PK = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    loss = policy_gradient(groups, advantage_PK, gspo, beta=BETA)
    assert_close(loss.value, torch.tensor(0.0, dtype=torch.float64))  # both ratios are e^0.1
    assert loss.metrics["ratio_mean"] == pytest.approx(math.exp(0.1))
    lengths = torch.tensor([[[2.0], [4.0]]])
    expected = -math.exp(0.1) * advantage_PK[:, :, None] / lengths * mask_PKT / 2
    assert_close(gradient(loss, logp_PKT), expected)


def test_a_ratio_of_whole_responses_is_the_product_of_its_tokens():
    groups = given_tokens(
        torch.full((1, 2, 4), -0.5, dtype=torch.float64),
        torch.full((1, 2, 4), -0.6, dtype=torch.float64),
        torch.eye(2)[:1],
    )
    loss = ProximalRLOO().loss(groups, beta=BETA)
    assert loss.metrics["ratio_mean"] == pytest.approx(math.exp(0.4))
    assert loss.metrics["ratio_cut"] == 1


def test_tokens_that_do_not_count_have_no_ratio():
    mask_PKT = torch.arange(3) < torch.tensor([[1, 2]])[:, :, None]
    logp_PKT = torch.tensor([[[-0.5, -9.0, -9.0], [-0.5, -0.5, -9.0]]], dtype=torch.float64)
    groups = given_tokens(logp_PKT, logp_PKT - 0.5, torch.eye(2)[:1], mask_PKT)
    found = GRPO().loss(groups, beta=BETA).metrics
    assert found["ratio_mean"] == pytest.approx(math.exp(0.5))
    assert found["ratio_cut"] == 1


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("correction", KINDS)
@pytest.mark.parametrize("name", [*GRADIENTS, "ppo", "vine-ppo"])
def test_what_is_set_for_a_correction_changes_the_loss_or_is_refused(name: str, correction: str):
    groups = groups_of(parameters(), toy.draw(26, 6, 6), toy.random_rewards(26, 6, 6), old_NL=OLD_NL)
    plain = named(name, correction=correction)(groups, beta=BETA).value
    other = {"correction_level": "mean", "clip_low": 0.01, "clip_high": 0.01, "ratio_cap": 1.01, "prox_share": 0.1}
    refused = 0
    for setting, value in other.items():
        try:
            objective = named(name, correction=correction, **{setting: value})
        except ValidationError:
            refused += 1
        else:
            assert not torch.equal(objective(groups, beta=BETA).value, plain), setting
    assert refused
