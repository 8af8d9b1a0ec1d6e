"""REINFORCE, RLOO, proximal RLOO, GRPO and Dr. GRPO, in closed form."""
# Shapes: P prompts, K responses per prompt, T tokens, N sequences of the toy.

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.harness import toy
from tba.objectives import trajectory_balance
from tba.objectives.policy_gradients.grpo import GRPO, DrGRPO
from tba.objectives.policy_gradients.policy_loss import policy_gradient
from tba.objectives.policy_gradients.reinforce import Reinforce
from tba.objectives.policy_gradients.rloo import RLOO, ProximalRLOO
from tests.support.tba.objective_examples import (
    BETA,
    OLD_NL,
    REF_NL,
    assert_close,
    given_tokens,
    gradient,
    groups_of,
    named,
    parameters,
)

UNCORRECTED = RLOO(penalty="none")


def test_a_shifted_baseline_is_subtracted_from_each_advantage_and_then_no_group_is_without_gradient():
    groups = groups_of(parameters(), toy.draw(10, 3, 4), toy.random_rewards(10, 3, 4))
    plain, shifted = UNCORRECTED.loss(groups, beta=BETA), RLOO(penalty="none", baseline_shift=-0.1)
    assert_close(shifted.loss(groups, beta=BETA).advantage_PK, plain.advantage_PK + 0.1)
    equal_PK, different_P = torch.ones(3, 4), torch.zeros(3, dtype=torch.bool)
    assert UNCORRECTED.has_no_gradient(equal_PK, different_P).all()
    assert not shifted.has_no_gradient(equal_PK, different_P).any()


def test_advantages_of_the_group_methods_are_multiples_of_one_another():
    groups = groups_of(parameters(), toy.draw(10, 3, 4), toy.random_rewards(10, 3, 4))
    left_out = UNCORRECTED.loss(groups, beta=BETA).advantage_PK
    reward_PK = groups.reward_PK
    for i in range(4):
        others = reward_PK[:, [j for j in range(4) if j != i]]
        assert_close(left_out[:, i], reward_PK[:, i] - others.mean(1))
    assert_close(left_out.sum(1), torch.zeros(3, dtype=torch.float64))
    mean = DrGRPO().loss(groups, beta=BETA).advantage_PK
    assert_close(mean, 3 / 4 * left_out)
    scaled = GRPO().loss(groups, beta=BETA).advantage_PK
    assert_close(scaled, mean / (reward_PK.std(1, keepdim=True) + 1e-4))


def test_rloo_with_its_penalty_is_trajectory_balance_left_one_out():
    logits, chosen_PK, reward_PK = parameters(), toy.draw(9, 4, 5), toy.random_rewards(9, 4, 5)
    groups = groups_of(logits, chosen_PK, reward_PK, old_NL=OLD_NL)
    balance = trajectory_balance(groups.logp_PK, groups.ref_logp_PK, reward_PK, beta=BETA, log_z="leave-one-out")
    assert_close(gradient(RLOO().loss(groups, beta=BETA), logits), BETA / 2 * gradient(balance, logits))


def test_grpo_is_clipped_token_by_token_with_k3_in_the_loss():
    old_PKT = torch.full((1, 2, 4), -3.0, dtype=torch.float64)
    logp_PKT = old_PKT.clone()
    logp_PKT[0, 0, 1] += math.log(1.5)  # a token of the better response
    logp_PKT.requires_grad_()
    groups = given_tokens(logp_PKT, old_PKT, torch.eye(2, dtype=torch.float64)[:1])
    alone, dr = (named(name, penalty="none")(groups, beta=BETA) for name in ("grpo", "dr-grpo"))
    for loss in (alone, dr):
        assert gradient(loss, logp_PKT)[0, 0, 1] == 0
        assert (gradient(loss, logp_PKT)[0, 0, [0, 2, 3]] < 0).all()
    away_PKT = -1 - logp_PKT
    k3_PKT = away_PKT.exp() - 1 - away_PKT
    assert_close(GRPO().loss(groups, beta=BETA).value, alone.value + BETA * k3_PKT.mean())


def test_grpo_does_not_see_the_scale_of_rewards():
    chosen_PK, reward_PK = toy.draw(11, 3, 4), 100 * toy.random_rewards(11, 3, 4)
    groups = (groups_of(parameters(), chosen_PK, it) for it in (reward_PK, 5 * reward_PK - 3))
    once, again = (GRPO().loss(it, beta=BETA) for it in groups)
    assert_close(again.advantage_PK, once.advantage_PK, 1e-4)


def test_the_log_ratio_to_the_reference_counts_as_reward():
    groups = groups_of(parameters(), toy.draw(12, 3, 4), toy.random_rewards(12, 3, 4))
    in_reward_PK = groups.reward_PK - BETA * (groups.logp_PK.detach() - groups.ref_logp_PK)
    assert_close(
        RLOO().loss(groups, beta=BETA).advantage_PK, 4 / 3 * (in_reward_PK - in_reward_PK.mean(1, keepdim=True))
    )
    assert_close(Reinforce().loss(groups, beta=BETA).advantage_PK, in_reward_PK - groups.reward_PK.mean())


def test_longer_responses_weigh_more_unless_their_tokens_are_averaged():
    """T28: every response becomes twice as long, with the same probabilities of tokens."""
    token_PK1 = -torch.rand(2, 3, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    old_PK1, reward_PK = token_PK1 - 0.05, toy.random_rewards(13, 2, 3)
    short, long = (given_tokens(token_PK1.expand(2, 3, n), old_PK1.expand(2, 3, n), reward_PK) for n in (4, 8))
    for objective, factor in ((named("dr-grpo", penalty="none"), 2), (named("grpo", penalty="none"), 1)):
        assert_close(objective(long, beta=BETA).value, factor * objective(short, beta=BETA).value)
    averaged = named("dr-grpo", normaliser="tokens")
    assert_close(averaged(long, beta=BETA).value, averaged(short, beta=BETA).value)


@pytest.mark.parametrize(
    ("normaliser", "divisor"),
    [("sum", 1.0), ("response", torch.tensor([[1.0, 2], [3, 2]])), ("row", torch.tensor([[3.0, 4], [5, 4]])),
     ("group", torch.tensor([[1.5], [2.5]])), ("tokens", 2.0), ("constant", 10.0)],
)  # fmt: skip
def test_what_the_sum_over_tokens_is_divided_by(normaliser: Any, divisor: Tensor | float):
    mask_PKT = torch.arange(4) < torch.tensor([[1, 2], [3, 2]])[:, :, None]
    logp_PKT = -toy.random_rewards(14, 2, 2, 4)
    groups = given_tokens(logp_PKT, logp_PKT, toy.random_rewards(14, 2, 2), mask_PKT)
    advantage_PK = toy.random_rewards(15, 2, 2)
    objective = RLOO(normaliser=normaliser)
    expected = -(advantage_PK * (logp_PKT * mask_PKT).sum(2) / divisor).mean()
    assert_close(policy_gradient(replace(groups, max_tokens=10), advantage_PK, objective, beta=BETA).value, expected)


def test_standardised_by_the_batch_all_advantages_are_divided_by_one_number():
    """Parts of the batch get the same advantages as the whole."""
    groups = groups_of(parameters(), toy.draw(11, 3, 4), toy.random_rewards(11, 3, 4))
    centred_PK = groups.reward_PK - groups.reward_PK.mean(1, True)
    objective = GRPO(penalty="none", standardised_by="batch")
    expected = centred_PK / (centred_PK.square().mean().sqrt() + 1e-4)
    assert_close(objective.loss(groups, beta=BETA).advantage_PK, expected)
    part = groups_of(parameters(), toy.draw(11, 3, 4)[:1], groups.reward_PK[:1])
    of_the_whole = replace(part, batch_spread=groups.batch_spread)
    assert_close(objective.loss(of_the_whole, beta=BETA).advantage_PK, expected[:1])
    with pytest.raises(ValueError, match="batch_spread"):
        objective.loss(replace(groups, batch_spread=None), beta=BETA)


def test_k3_is_never_negative_and_on_average_the_divergence():
    logits = parameters()
    everything = torch.arange(toy.N)[None]
    groups = groups_of(logits, everything, torch.zeros(1, toy.N))
    penalty = RLOO(penalty="loss")
    alone = policy_gradient(groups, torch.zeros(1, toy.N, dtype=torch.float64), penalty, beta=BETA)
    assert alone.metrics["k3"] >= 0
    probability_N = toy.sequence_logps(logits).exp()
    k3_NT = (REF_NL - toy.token_logps(logits)).expm1() - (REF_NL - toy.token_logps(logits))
    divergence = (probability_N * (toy.token_logps(logits) - REF_NL).sum(1)).sum()
    assert_close((probability_N * k3_NT.sum(1)).sum(), divergence)
    assert_close(alone.value, BETA * k3_NT.sum(1).mean())


def test_proximal_rloo_expects_what_rloo_does_on_policy():
    """T33: expectation over all pairs that the sampler can draw."""
    logits = parameters()
    pairs_PK = torch.tensor(list(product(range(toy.N), repeat=2)))
    reward_PK = toy.random_rewards(16, toy.N)[pairs_PK]
    unclipped = ProximalRLOO(clip_low=1.0, clip_high=1e9)

    def expected(sampler_NL: Tensor | None, objective: RLOO | ProximalRLOO) -> Tensor:
        weight_N = (toy.token_logps(logits).detach() if sampler_NL is None else sampler_NL).sum(1).exp()
        total = torch.zeros_like(logits)
        for pair_K, reward_K in zip(pairs_PK, reward_PK, strict=True):
            groups = groups_of(logits, pair_K[None], reward_K[None], old_NL=sampler_NL)
            total += weight_N[pair_K].prod() * gradient(objective.loss(groups, beta=BETA), logits)
        return total

    assert_close(expected(OLD_NL, unclipped), expected(None, UNCORRECTED))


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_a_share_of_the_negative_advantages_pushes_down_less_and_up_as_before(share: float):
    logits, chosen_PK, reward_PK = parameters(), toy.draw(9, 4, 5), toy.random_rewards(9, 4, 5)
    groups = groups_of(logits, chosen_PK, reward_PK, old_NL=OLD_NL)
    whole = UNCORRECTED.loss(groups, beta=BETA).advantage_PK
    less = RLOO(penalty="none", negative_share=share).loss(groups, beta=BETA)
    expected_PK = whole.clamp(min=0) + share * whole.clamp(max=0)
    assert (whole < 0).any() and (whole > 0).any()
    assert_close(less.advantage_PK, expected_PK)
    [expected] = torch.autograd.grad(-(expected_PK * groups.logp_PK).mean(), logits, retain_graph=True)
    assert_close(gradient(less, logits), expected)


def test_without_negative_advantages_old_responses_teach_the_likelihood_of_the_right_ones():
    """The best response of each group has reward 1. The weights are those of supervised learning on these responses,
    times the share of wrong ones, whoever sampled them."""
    logits, chosen_PK = parameters(), toy.draw(9, 4, 5)
    reward_PK = torch.eye(5, dtype=torch.float64)[:4]
    for sampled in ({}, {"old_NL": OLD_NL}):
        groups = groups_of(logits, chosen_PK, reward_PK, **sampled)
        loss = DrGRPO(correction="none", normaliser="sum", negative_share=0.0).loss(groups, beta=BETA)
        [likelihood] = torch.autograd.grad((groups.logp_PK * reward_PK).mean(), logits, retain_graph=True)
        assert_close(gradient(loss, logits), -4 / 5 * likelihood)
