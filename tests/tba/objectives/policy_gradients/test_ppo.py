"""PPO: its mathematical properties token by token."""
# Shapes: P prompts, K responses per prompt, T tokens, N sequences of the toy of L tokens, R its prefixes.

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.harness import toy
from tba.objectives import Groups
from tba.objectives.policy_gradients.policy_loss import policy_gradient
from tba.objectives.policy_gradients.ppo import PPO, gae, token_rewards, value_loss, whiten
from tba.objectives.policy_gradients.rloo import ProximalRLOO
from tests.support.tba.objective_examples import BETA, REF_NL, assert_close, given_tokens, gradient, parameters

HOLES_PKT = torch.tensor(
    [[[1, 1, 1, 1, 1], [0, 1, 0, 1, 0]], [[0, 0, 1, 1, 0], [1, 0, 0, 0, 0]], [[1, 0, 1, 1, 1], [0, 0, 0, 0, 0]]]
).bool()
REWARD_PKT, VALUE_PKT = (2 * toy.random_rewards(seed, *HOLES_PKT.shape) - 1 for seed in (1, 2))


def advantages(discount: float, decay: float, mask_PKT: Tensor = HOLES_PKT) -> Tensor:
    return gae(REWARD_PKT, VALUE_PKT, mask_PKT, discount=discount, decay=decay)


def rows_of(*tensors_PKT: Tensor) -> Any:
    """Return the numbers of each row, for the tokens that count."""
    masks_BT = HOLES_PKT.flatten(0, 1)
    return zip(*([row[mask] for row, mask in zip(it.flatten(0, 1), masks_BT, strict=True)] for it in tensors_PKT))  # noqa: B905


# --- generalised advantages -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("discount", "decay"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.7, 0.0), (0.0, 1.0)])
def test_an_advantage_is_the_decayed_sum_of_errors_and_tokens_that_do_not_count_do_not_exist(discount, decay):
    found_PKT = advantages(discount, decay)
    for found_T, reward_T, value_T in rows_of(found_PKT, REWARD_PKT, VALUE_PKT):
        n = len(found_T)
        errors = [reward_T[t] + (discount * value_T[t + 1] if t + 1 < n else 0) - value_T[t] for t in range(n)]
        for t in range(n):
            expected = sum((discount * decay) ** i * error for i, error in enumerate(errors[t:]))
            assert_close(found_T[t], expected)
    assert (found_PKT[~HOLES_PKT] == 0).all()


def test_undecayed_an_advantage_is_the_return_less_the_value():
    for found_T, reward_T, value_T in rows_of(advantages(1.0, 1.0), REWARD_PKT, VALUE_PKT):
        assert_close(found_T, reward_T.flip(0).cumsum(0).flip(0) - value_T)


def test_decayed_at_once_it_is_the_error_of_the_next_value():
    for found_T, reward_T, value_T in rows_of(advantages(1.0, 0.0), REWARD_PKT, VALUE_PKT):
        following_T = torch.nn.functional.pad(value_T, (0, 1))[1:]
        assert_close(found_T, reward_T + following_T - value_T)


@pytest.mark.parametrize(("decay", "exact"), [(1.0, False), (1.0, True), (0.95, True), (0.0, True)])
def test_on_policy_advantages_expect_the_gradient_of_reward_less_divergence(decay: float, exact: bool):
    """This holds with any values if decay is 1, and with the true values otherwise."""
    logits = parameters()
    probability_N = toy.sequence_logps(logits).exp()
    reward_N = toy.random_rewards(3, toy.N)
    groups = everything(logits, reward_N)
    reward_PKT = token_rewards(groups, PPO(), beta=BETA)
    value_R = toy.random_rewards(4, toy.R)
    if exact:
        return_NL, weight_NL = reward_PKT[0].flip(1).cumsum(1).flip(1), probability_N.detach()[:, None].expand(-1, 3)
        rows_N = toy.PREFIX_ROWS_NL.flatten()
        total_R, mass_R = (
            torch.zeros(toy.R, dtype=torch.float64).index_add(0, rows_N, it.flatten())
            for it in (return_NL * weight_NL, weight_NL)
        )
        value_R = total_R / mass_R
    advantage_NL = gae(reward_PKT, value_R[toy.PREFIX_ROWS_NL][None], groups.mask_PKT, discount=1.0, decay=decay)[0]
    surrogate_J = (probability_N.detach() * (advantage_NL * toy.token_logps(logits)).sum(1)).sum()
    divergence = (probability_N * (toy.token_logps(logits) - REF_NL).sum(1)).sum()
    wanted = torch.autograd.grad(probability_N @ reward_N - BETA * divergence, logits, retain_graph=True)[0]
    assert_close(torch.autograd.grad(surrogate_J, logits)[0], wanted)


@pytest.mark.parametrize("decay", [0.0, 0.95, 1.0])
def test_at_the_target_all_advantages_are_0_whoever_sampled(decay: float):
    """The value of a prefix is beta log of the mean of exp(r / beta) over the reference's continuations of it."""
    reward_N = toy.random_rewards(3, toy.N)
    value_NL = toy.soft_values(REF_NL, reward_N, BETA)[toy.PREFIX_ROWS_NL]
    following_NL = torch.cat([value_NL[:, 1:], reward_N[:, None]], dim=1)
    logp_NL = REF_NL + (following_NL - value_NL) / BETA
    assert_close(logp_NL.sum(1), toy.target_logps(REF_NL.sum(1), reward_N, BETA))
    groups = replace(everything(toy.random_logits(1), reward_N), logp_PKT=logp_NL[None])
    reward_PKT = token_rewards(groups, PPO(), beta=BETA)
    found_PKT = gae(reward_PKT, value_NL[None], groups.mask_PKT, discount=1.0, decay=decay)
    assert_close(found_PKT, torch.zeros_like(found_PKT))


def everything(logits: Tensor, reward_N: Tensor) -> Groups:
    """Return every sequence of the toy once, in one group."""
    logp_NL = toy.token_logps(logits)
    return Groups(
        logp_PKT=logp_NL[None],
        mask_PKT=torch.ones(1, toy.N, toy.L, dtype=torch.bool),
        reward_PK=reward_N[None],
        ref_logp_PK=REF_NL.sum(1)[None],
        ref_logp_PKT=REF_NL[None],
        behaviour_logp_PKT=logp_NL.detach()[None],
        batch_tokens=float(toy.L),
    )


def test_the_reward_comes_with_the_last_token_that_counts_and_the_penalty_with_each():
    logp_PKT, old_PKT = (-toy.random_rewards(seed, *HOLES_PKT.shape) for seed in (5, 6))
    reward_PK = toy.random_rewards(7, 3, 2)
    groups = given_tokens(logp_PKT.requires_grad_(), old_PKT, reward_PK, HOLES_PKT)
    found_PKT = token_rewards(groups, PPO(), beta=BETA)
    away_PKT = (logp_PKT.detach() + 1) * HOLES_PKT
    plain_PKT = token_rewards(groups, PPO(penalty="none"), beta=BETA)
    assert not found_PKT.requires_grad
    assert_close(found_PKT, plain_PKT - BETA * away_PKT)
    rows = zip(plain_PKT.flatten(0, 1), HOLES_PKT.flatten(0, 1), reward_PK.flatten(), strict=True)
    for row_T, mask_T, reward in rows:
        counted = mask_T.nonzero().flatten().tolist()
        assert row_T.nonzero().flatten().tolist() == counted[-1:]
        assert_close(row_T.sum(), reward if counted else torch.tensor(0.0, dtype=torch.float64))


# --- whitening and the losses -----------------------------------------------------------------------------------------


@hypothesis_settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.floats(-100, 100), st.floats(0.01, 100))
def test_whitened_advantages_have_mean_0_and_unbiased_variance_1_over_what_counts(seed, shift, scale):
    advantage_PKT = shift + scale * toy.random_rewards(seed, *HOLES_PKT.shape)
    found_PKT = whiten(advantage_PKT, HOLES_PKT)
    counted_N = found_PKT[HOLES_PKT]
    assert float(counted_N.mean()) == pytest.approx(0, abs=1e-9)
    assert float(counted_N.var()) == pytest.approx(1, abs=1e-2 if scale < 0.1 else 1e-4)  # 1e-8 is added to it
    assert (found_PKT[~HOLES_PKT] == 0).all()
    junk_PKT = torch.where(HOLES_PKT, advantage_PKT, 1e6)
    assert_close(whiten(junk_PKT, HOLES_PKT), found_PKT)


@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_whitening_what_does_not_vary_leaves_nothing(tokens):
    mask_PKT = torch.arange(4)[None, None] < tokens
    assert (whiten(torch.full((1, 1, 4), 0.3), mask_PKT) == 0).all()


def test_the_value_loss_is_half_the_square_of_the_farther_of_value_and_clipped_value():
    value, old, wanted = (torch.tensor(it, dtype=torch.float64) for it in (
        [1.0, 1.0, 1.0, 0.1, 0.5], [0.0, 0.0, 0.0, 0.0, 0.5], [2.0, 0.9, -1.0, 0.5, 0.0],
    ))  # fmt: skip
    value.requires_grad_()
    found = value_loss(value, old, wanted, clip=0.2)
    assert_close(found, torch.tensor([1.8**2, 0.7**2, 2.0**2, 0.4**2, 0.5**2], dtype=torch.float64) / 2)
    (slope,) = torch.autograd.grad(found.sum(), value)
    assert_close(slope, torch.tensor([0.0, 0.0, 2.0, -0.4, 0.5], dtype=torch.float64))


def with_advantages(groups: Groups, advantage_PKT: Tensor) -> Groups:
    return replace(groups, advantage_PKT=advantage_PKT, return_PKT=torch.zeros_like(advantage_PKT))


def test_a_token_whose_ratio_has_gone_far_enough_teaches_nothing_more():
    old_PKT = torch.full((1, 2, 3), -3.0, dtype=torch.float64)
    logp_PKT = (old_PKT + torch.tensor([1.5, 0.5, 1.0]).double().log()).requires_grad_()
    advantage_PKT = torch.tensor([[[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]]], dtype=torch.float64)
    groups = with_advantages(given_tokens(logp_PKT, old_PKT, torch.zeros(1, 2)), advantage_PKT)
    expected_PKT = torch.tensor([[[0.0, 0.5, 1.0], [-1.5, 0.0, -1.0]]], dtype=torch.float64)
    loss = PPO().loss(groups, beta=BETA)
    assert_close(gradient(loss, logp_PKT), -expected_PKT / 6)
    assert loss.metrics["ratio_cut"] == pytest.approx(4 / 6)


def test_at_the_policy_that_sampled_it_is_the_policy_gradient_of_each_tokens_advantage():
    logp_PKT = -toy.random_rewards(8, *HOLES_PKT.shape)
    advantage_PKT = (toy.random_rewards(9, *HOLES_PKT.shape) - 0.5) * HOLES_PKT
    groups = given_tokens(logp_PKT.requires_grad_(), logp_PKT.detach(), torch.zeros(3, 2), HOLES_PKT)
    loss = PPO().loss(with_advantages(groups, advantage_PKT), beta=BETA)
    assert_close(gradient(loss, logp_PKT), -advantage_PKT / HOLES_PKT.sum())
    assert_close(loss.advantage_PK, advantage_PKT.sum(2) / HOLES_PKT.sum(2).clamp(min=1))


def test_values_are_drawn_to_the_returns_by_their_share_of_the_loss():
    logp_PKT, value_PKT = -toy.random_rewards(8, *HOLES_PKT.shape), VALUE_PKT.clone().requires_grad_()
    groups = given_tokens(logp_PKT, logp_PKT, torch.zeros(3, 2), HOLES_PKT)
    groups = replace(with_advantages(groups, REWARD_PKT), value_PKT=value_PKT, return_PKT=REWARD_PKT)
    loss = PPO(value_share=0.3).loss(groups, beta=BETA)
    n = HOLES_PKT.sum()
    away_N = (VALUE_PKT - REWARD_PKT)[HOLES_PKT]
    assert_close(gradient(loss, value_PKT), 0.3 * (VALUE_PKT - REWARD_PKT) * HOLES_PKT / n)
    assert_close(loss.metrics["value_loss"], away_N.square().mean() / 2)


def test_the_explained_variance_is_1_for_the_returns_themselves_and_0_for_a_constant():
    logp_PKT = -torch.ones(*HOLES_PKT.shape, dtype=torch.float64)  # equal to the reference: no penalty
    reward_PK = toy.random_rewards(7, 3, 2)
    groups = given_tokens(logp_PKT, logp_PKT, reward_PK, HOLES_PKT)

    def explained(value_PKT: Tensor) -> float:
        found = PPO(gae_decay=1.0).estimates(replace(groups, value_PKT=value_PKT), beta=BETA)
        return float(found.metrics["explained_variance"])

    assert explained(reward_PK[:, :, None].expand_as(HOLES_PKT)) == pytest.approx(1)
    assert explained(torch.full_like(VALUE_PKT, 0.4)) == pytest.approx(0, abs=1e-12)
    groups = replace(groups, reward_PK=torch.ones_like(reward_PK))
    assert explained(VALUE_PKT) == 0


def test_an_advantage_of_each_token_cannot_be_corrected_by_ratios_of_whole_responses():
    groups = given_tokens(VALUE_PKT, VALUE_PKT, torch.zeros(3, 2), HOLES_PKT)
    with pytest.raises(ValueError, match=r"needs \[P, K\] advantages, got \[3, 2, 5\]"):
        policy_gradient(groups, VALUE_PKT, ProximalRLOO(), beta=BETA)
