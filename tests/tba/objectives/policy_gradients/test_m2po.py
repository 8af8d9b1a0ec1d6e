"""M2PO: which tokens of old data are left out, and the gradient of the others."""
# Shapes: P prompts, K responses per prompt, T tokens, N sequences of the toy.

import pytest
import torch

from benchmarks.harness import toy
from tba.objectives import Groups
from tba.objectives.policy_gradients.m2po import M2PO, within_second_moment
from tests.support.tba.objective_examples import BETA, OLD_NL, assert_close, gradient, groups_of, parameters

CHOSEN_PK, REWARD_PK = toy.draw(4, 3, 4), toy.random_rewards(4, 3, 4)


def of(logits: torch.Tensor, **chosen: float) -> tuple[M2PO, Groups]:
    objective, groups = M2PO(**chosen), groups_of(logits, CHOSEN_PK, REWARD_PK, old_NL=OLD_NL)
    return objective, objective.estimates(groups, beta=BETA).of(0, groups)


@pytest.mark.parametrize(
    ("most", "stay"),
    [
        (1e-9, [True, False, False, False, False]),
        (0.04, [True, True, True, False, False]),  # the mean of 0, 0.01 and 0.09 is 0.033
        (0.07, [True, True, True, True, False]),  # of these and 0.16, 0.065
        (0.2, [True] * 4 + [False]),
        (100.0, [True] * 5),
    ],
)
def test_the_tokens_with_the_largest_ratios_are_left_out_until_the_mean_square_is_small_enough(most, stay):
    log_ratio_T, others_T = torch.tensor([0.0, -0.1, 0.3, -0.4, 2.0]), torch.tensor([50.0, -50.0])
    order = torch.tensor([3, 5, 0, 6, 2, 4, 1])  # tokens that do not count are among them
    mixed_T, mask_T = torch.cat([log_ratio_T, others_T])[order], (order < 5)
    found_T = within_second_moment(mixed_T, mask_T, most)
    assert found_T.tolist() == [it < 5 and stay[it] for it in order.tolist()]


def test_tokens_with_equal_ratios_stay_together_or_are_left_out_together():
    log_ratio_T = torch.tensor([0.1, 0.5, -0.5, 0.5, 0.0])
    mask_T = torch.ones(5, dtype=torch.bool)
    assert within_second_moment(log_ratio_T, mask_T, 0.1).tolist() == [True, False, False, False, True]
    assert within_second_moment(log_ratio_T, mask_T, 0.16).all()


@pytest.mark.parametrize("most", [0.05, 0.2, 0.6])
def test_the_loss_is_that_of_the_ratios_of_the_tokens_that_stay(most: float):
    logits = parameters()
    objective, groups = of(logits, second_moment=most)
    log_ratio_PKT = groups.logp_PKT - groups.needed("behaviour_logp_PKT")
    square_PKT = log_ratio_PKT.detach().square()
    bounds = [it for it in square_PKT.unique().tolist() if square_PKT[square_PKT <= it].mean() <= most]
    keep_PKT = square_PKT <= max(bounds)
    assert 0 < keep_PKT.sum() < keep_PKT.numel()
    advantage_PK = (REWARD_PK - REWARD_PK.mean(1, True)) / (REWARD_PK.std(1, keepdim=True) + 1e-4)
    expected = -(log_ratio_PKT.exp() * advantage_PK[:, :, None] * keep_PKT).sum() / keep_PKT.numel()
    loss = objective.loss(groups, beta=BETA)
    assert_close(loss.value, expected)
    assert_close(gradient(loss, logits), torch.autograd.grad(expected, logits)[0])


def test_the_share_of_tokens_that_are_left_out_is_reported_of_the_whole_batch():
    objective, groups = M2PO(second_moment=0.2), groups_of(parameters(), CHOSEN_PK, REWARD_PK, old_NL=OLD_NL)
    log_ratio_PKT = groups.logp_PKT.detach() - groups.needed("behaviour_logp_PKT")
    stay_PKT = within_second_moment(log_ratio_PKT, groups.mask_PKT, 0.2)
    reported = objective.estimates(groups, beta=BETA).metrics["ratio_cut"]
    assert float(reported) == pytest.approx(1 - float(stay_PKT.sum()) / stay_PKT.numel())


def test_if_every_ratio_is_too_large_no_token_stays():
    log_ratio_T, mask_T = torch.tensor([3.0, -4.0]), torch.tensor([True, False])
    assert not within_second_moment(log_ratio_T, mask_T, 0.04).any()
