"""BAPO: which bounds of the ratio are chosen, and the gradient of the tokens within them."""
# Shapes: P prompts, K responses per prompt, T tokens, N tokens or sequences of the toy.

import pytest
import torch

from benchmarks.harness import toy
from tba.objectives import Groups
from tba.objectives.policy_gradients.bapo import BAPO, balancing_bounds
from tests.support.tba.objective_examples import BETA, OLD_NL, assert_close, gradient, groups_of, parameters

CHOSEN_PK, REWARD_PK = toy.draw(4, 3, 4), toy.random_rewards(4, 3, 4)


def of(logits: torch.Tensor, **chosen: float) -> tuple[BAPO, Groups]:
    objective, groups = BAPO(**chosen), groups_of(logits, CHOSEN_PK, REWARD_PK, old_NL=OLD_NL)
    return objective, objective.estimates(groups, beta=BETA).of(0, groups)


@pytest.mark.parametrize(
    ("ratios", "bad", "share", "bounds"),
    [
        ([2.0], 1.0, 0.4, (0.6, 1.2)),  # 1.2 of 2.2
        ([2.0], 2.0, 0.4, (0.6, 1.35)),  # 1.35 of 3.35: the first of at least 0.4
        ([2.0], 3.0, 0.4, (0.6, 2.0)),  # exactly 2 of 5
        ([9.0], 4.5, 0.4, (0.6, 3.0)),  # 3 of 7.5
        ([9.0], 5.0, 0.4, (0.9, 3.0)),  # never: both bounds are as high as they may be
        ([0.1], 5.0, 0.4, (0.9, 3.0)),
        ([9.0], 4.5, 0.3, (0.6, 1.95)),  # 1.95 of 6.45
    ],
)
def test_bounds_rise_until_good_tokens_contribute_enough(ratios, bad, share, bounds):
    """One good token with a given ratio stands against bad tokens with ratios of 1 and a given sum of advantages."""
    ratio_N = torch.tensor([*ratios, 1.0, 1.0], dtype=torch.float64)
    advantage_N = torch.tensor([1.0, -bad / 4, -bad * 3 / 4], dtype=torch.float64)
    assert balancing_bounds(ratio_N, advantage_N, share) == bounds


def test_a_bad_token_contributes_at_least_what_the_lower_bound_says():
    ratio_N, advantage_N = torch.tensor([1.0, 0.1]), torch.tensor([1.0, -2.0])
    assert balancing_bounds(ratio_N, advantage_N, 0.45) == (0.6, 1.2)  # 1 of 2.2
    assert balancing_bounds(ratio_N, advantage_N, 0.46) == (0.9, 3.0)


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_the_gradient_is_that_of_the_clipped_minimum_with_the_bounds_of_the_whole_batch(share: float):
    logits = parameters()
    objective, groups = of(logits, positive_contribution=share)
    metrics = objective.estimates(groups, beta=BETA).metrics
    low, high = float(metrics["ratio_low"]), float(metrics["ratio_high"])
    ratio_PKT = (groups.logp_PKT - groups.needed("behaviour_logp_PKT")).exp()
    advantage_PK = (REWARD_PK - REWARD_PK.mean(1, True)) / (REWARD_PK.std(1, keepdim=True) + 1e-4)
    advantage_PKT = advantage_PK[:, :, None].expand_as(ratio_PKT)
    assert (low, high) == balancing_bounds(ratio_PKT.detach().flatten(), advantage_PKT.flatten(), share)
    minimum_PKT = torch.minimum(ratio_PKT * advantage_PKT, ratio_PKT.clamp(low, high) * advantage_PKT)
    expected = torch.autograd.grad(-minimum_PKT.mean(), logits, retain_graph=True)[0]
    assert_close(gradient(objective.loss(groups, beta=BETA), logits), expected)
    is_cut_PKT = torch.where(advantage_PKT > 0, ratio_PKT > high, ratio_PKT < low)
    assert 0 < is_cut_PKT.sum() < is_cut_PKT.numel()
    assert float(metrics["ratio_cut"]) == pytest.approx(float(is_cut_PKT.double().mean()))


@pytest.mark.parametrize(("share", "high"), [(0.05, 1.2), (0.95, 3.0)])
def test_bounds_follow_the_share_that_is_asked_for(share: float, high: float):
    groups = groups_of(parameters(), CHOSEN_PK, REWARD_PK, old_NL=OLD_NL)
    metrics = BAPO(positive_contribution=share).estimates(groups, beta=BETA).metrics
    assert float(metrics["ratio_high"]) == high


def test_tokens_that_do_not_count_have_no_say():
    objective, groups = of(parameters(), positive_contribution=0.5)
    log_ratio_PKT = torch.zeros_like(groups.logp_PKT.detach())
    mask_PKT = torch.ones_like(log_ratio_PKT, dtype=torch.bool)
    mask_PKT[:, :, -1] = False
    advantage_PK = torch.tensor([[1.0, -1.0, 0.5, -0.5]] * 3, dtype=torch.float64)
    loud_PKT = log_ratio_PKT.clone()
    loud_PKT[:, 1, -1] = 5.0  # would make bad tokens contribute nearly everything
    stays_PKT, metrics = objective.stays(loud_PKT, advantage_PK, mask_PKT)
    assert torch.equal(stays_PKT, mask_PKT) and float(metrics["ratio_high"]) == 1.2
