"""Properties of trajectory balance, in closed form on a universe that is small enough to count."""
# Shapes: P prompts, K responses per prompt, N sequences of the toy, B = P x K.

import math
from itertools import combinations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.harness import toy
from tba.objectives import Loss, trajectory_balance
from tests.support.tba.objective_examples import assert_close, parameters

BETA = 0.5
REF_N = toy.sequence_logps(toy.random_logits(seed=1))


def loss_of(logits: Tensor, chosen_PK: Tensor, reward_PK: Tensor, **options) -> Loss:
    logp_N = toy.sequence_logps(logits)
    return trajectory_balance(logp_N[chosen_PK], REF_N[chosen_PK], reward_PK, **{"beta": BETA, **options})


def gradient(value: Tensor, parameters: Tensor) -> Tensor:
    return torch.autograd.grad(value, parameters, retain_graph=True)[0]


# --- The target ---


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(2, 6), st.sampled_from([0.004, 0.05, 0.5, 2.0]))
def test_at_the_tilted_reference_every_residual_is_zero_whoever_sampled(seed, prompts, k, beta):
    target_N = toy.target_logps(REF_N, toy.ALL_DIFFER_N, beta)
    chosen_PK = toy.draw(seed, prompts, k)
    loss = trajectory_balance(target_N[chosen_PK], REF_N[chosen_PK], toy.ALL_DIFFER_N[chosen_PK], beta=beta)
    success = float(REF_N.exp() @ toy.ALL_DIFFER_N)
    log_z = math.log(1 - success + success * math.exp(1 / beta))
    assert loss.residual_PK.abs().max() < 1e-10
    assert loss.value < 1e-20
    assert_close(loss.log_z_P, torch.full((prompts,), log_z, dtype=torch.float64))


@pytest.mark.parametrize("log_z", ["group", "leave-one-out"])
@pytest.mark.parametrize("power", [0.4, 1 / 1.2, 2.0])
def test_a_reference_that_counts_more_or_less_than_once_is_balanced_where_its_power_is(log_z, power):
    reward_N = toy.random_rewards(3, toy.N)
    target_N = toy.target_logps(power * REF_N, reward_N, BETA)
    rows = (target_N[None], REF_N[None], reward_N[None])
    loss = trajectory_balance(*rows, beta=BETA, log_z=log_z, reference_power=power)
    assert loss.residual_PK.abs().max() < 1e-10
    assert_close(loss.log_z_P, torch.logsumexp(power * REF_N + reward_N / BETA, dim=0)[None])
    assert_close(loss.metrics["log_ratio_mean"], (target_N - REF_N).mean())
    assert trajectory_balance(*rows, beta=BETA, log_z=log_z).residual_PK.abs().max() > 1e-2


def test_at_the_tilted_reference_any_reward_is_balanced():
    reward_N = toy.random_rewards(3, toy.N)
    target_N = toy.target_logps(REF_N, reward_N, BETA)
    loss = trajectory_balance(target_N[None], REF_N[None], reward_N[None], beta=BETA)
    assert loss.residual_PK.abs().max() < 1e-10
    assert_close(loss.log_z_P, torch.logsumexp(REF_N + reward_N / BETA, dim=0)[None])


# --- The gradient of one batch ---


def test_gradient_is_reinforce_with_the_group_mean_as_baseline():
    logits, chosen_PK = parameters(2), toy.draw(4, 5, 6)
    chosen_PK[:, 1] = chosen_PK[:, 0]  # a repeated sample in every group
    reward_PK = toy.random_rewards(5, 5, 6)
    scores = torch.func.jacrev(toy.sequence_logps)(logits.detach())[chosen_PK]  # [P, K, R, V]
    u_PK = (toy.sequence_logps(logits) - REF_N)[chosen_PK].detach()
    advantage_PK = (reward_PK - reward_PK.mean(1, keepdim=True)) - BETA * (u_PK - u_PK.mean(1, keepdim=True))
    expected = -2 / (BETA * chosen_PK.numel()) * torch.einsum("pk,pkrv->rv", advantage_PK, scores)
    loss = loss_of(logits, chosen_PK, reward_PK)
    assert_close(gradient(loss.value, logits), expected)
    assert_close(loss.residual_PK, -advantage_PK / BETA)


def test_differentiating_log_z_too_would_change_nothing():
    logits, chosen_PK, reward_PK = parameters(2), toy.draw(6, 3, 5), toy.random_rewards(7, 3, 5)
    f_PK = (toy.sequence_logps(logits) - REF_N)[chosen_PK] - reward_PK / BETA
    attached = (f_PK - f_PK.mean(1, keepdim=True)).square().mean()
    loss = loss_of(logits, chosen_PK, reward_PK)
    assert_close(loss.value, attached)
    assert_close(gradient(loss.value, logits), gradient(attached, logits))


def test_the_loss_is_the_mean_variance_of_the_groups_and_half_their_mean_squared_difference():
    logits, chosen_PK, reward_PK = parameters(2), toy.draw(8, 4, 5), toy.random_rewards(9, 4, 5)
    f_PK = (toy.sequence_logps(logits) - REF_N)[chosen_PK] - reward_PK / BETA
    loss = loss_of(logits, chosen_PK, reward_PK)
    assert_close(loss.value, f_PK.var(dim=1, correction=0).mean())
    assert_close(loss.value, (f_PK[:, :, None] - f_PK[:, None, :]).square().mean() / 2)


@pytest.mark.parametrize("k", [2, 3, 8])
def test_leaving_one_out_multiplies_residuals_and_gradient(k):
    logits, chosen_PK, reward_PK = parameters(2), toy.draw(10, 4, k), toy.random_rewards(11, 4, k)
    whole = loss_of(logits, chosen_PK, reward_PK)
    left_out = loss_of(logits, chosen_PK, reward_PK, log_z="leave-one-out")
    assert_close(left_out.residual_PK, whole.residual_PK * k / (k - 1))
    assert_close(gradient(left_out.value, logits), gradient(whole.value, logits) * k / (k - 1))
    f_PK = (toy.sequence_logps(logits) - REF_N)[chosen_PK].detach() - reward_PK / BETA
    others = (f_PK.sum(1, keepdim=True) - f_PK) / (k - 1)
    assert_close(left_out.residual_PK, f_PK - others)


# --- Expectations: a flat softmax over few outcomes, all groups enumerated ---


def flat_problem(outcomes: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(outcomes)
    logits, ref_logits = torch.randn(2, outcomes, generator=generator, dtype=torch.float64)
    reward_N = torch.rand(outcomes, generator=generator, dtype=torch.float64)
    return logits.requires_grad_(), torch.log_softmax(ref_logits, 0), reward_N


def expected_loss(logits: Tensor, ref_N: Tensor, reward_N: Tensor, groups, weights) -> Tensor:
    """Return the loss of one group, averaged with fixed weights over all possible groups."""
    logp_N = torch.log_softmax(logits, 0)
    total = torch.zeros((), dtype=torch.float64)
    for group, weight in zip(groups, weights, strict=True):
        chosen = torch.tensor([group])
        total = total + weight * trajectory_balance(logp_N[chosen], ref_N[chosen], reward_N[chosen], beta=BETA).value
    return total


@pytest.mark.parametrize("k", [2, 3])
def test_on_policy_the_gradient_is_that_of_reward_minus_kl(k):
    logits, ref_N, reward_N = flat_problem(5)
    logp_N = torch.log_softmax(logits, 0)
    groups = list(product(range(5), repeat=k))
    weights = [float(logp_N.detach()[list(group)].sum().exp()) for group in groups]
    loss = expected_loss(logits, ref_N, reward_N, groups, weights)
    objective = logp_N.exp() @ (reward_N - BETA * (logp_N - ref_N))
    expected = -2 * (k - 1) / (BETA * k) * gradient(objective, logits)
    assert_close(gradient(loss, logits), expected, tolerance=1e-14)
    f_N = (logp_N - ref_N - reward_N / BETA).detach()
    p_N = logp_N.detach().exp()
    assert_close(loss, (k - 1) / k * (p_N @ f_N.square() - (p_N @ f_N).square()), tolerance=1e-13)


@pytest.mark.parametrize("k", [2, 3])
def test_off_policy_the_loss_is_the_variance_under_whoever_sampled(k):
    logits, ref_N, reward_N = flat_problem(5)
    groups = list(product(range(5), repeat=k))
    loss = expected_loss(logits, ref_N, reward_N, groups, [5.0**-k] * len(groups))
    f_N = torch.log_softmax(logits, 0) - ref_N - reward_N / BETA
    expected = (k - 1) / k * f_N.var(correction=0)
    assert_close(loss, expected, tolerance=1e-13)
    assert_close(gradient(loss, logits), gradient(expected, logits), tolerance=1e-13)


def test_drawn_without_replacement_the_loss_is_the_sample_variance():
    logits, ref_N, reward_N = flat_problem(7)
    groups = list(combinations(range(7), 3))
    loss = expected_loss(logits, ref_N, reward_N, groups, [1 / len(groups)] * len(groups))
    f_N = torch.log_softmax(logits, 0) - ref_N - reward_N / BETA
    assert_close(loss, 2 / 3 * f_N.var(correction=1), tolerance=1e-13)


# --- Invariances ---


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.floats(-100, 100), st.floats(0.01, 100), st.randoms(use_true_random=False))
def test_shifts_of_rewards_common_scales_and_permutations_change_nothing(seed, shift, scale, random):
    logits, chosen_PK, reward_PK = parameters(2), toy.draw(seed, 3, 4), toy.random_rewards(seed, 3, 4)
    plain = loss_of(logits, chosen_PK, reward_PK)
    groups, members = random.sample(range(3), 3), random.sample(range(4), 4)
    variants = [
        loss_of(logits, chosen_PK, reward_PK + shift * torch.arange(3)[:, None]),
        loss_of(logits, chosen_PK, reward_PK * scale, beta=BETA * scale),
        loss_of(logits, chosen_PK[groups][:, members], reward_PK[groups][:, members]),
    ]
    for variant in variants:
        assert_close(variant.value, plain.value)
        assert_close(gradient(variant.value, logits), gradient(plain.value, logits))


def test_equal_rewards_still_pull_towards_the_reference():
    chosen_PK, reward_PK = toy.draw(12, 4, 5), torch.ones(4, 5, dtype=torch.float64)
    at_reference, elsewhere = toy.random_logits(seed=1).requires_grad_(), parameters(2)
    assert gradient(loss_of(at_reference, chosen_PK, reward_PK).value, at_reference).abs().max() < 1e-12
    assert gradient(loss_of(elsewhere, chosen_PK, reward_PK).value, elsewhere).abs().max() > 0.1
    assert loss_of(elsewhere, chosen_PK, reward_PK).metrics["equal_rewards"] == 1


# --- What it refuses ---


def test_one_response_per_prompt_is_refused_because_its_loss_would_silently_be_zero():
    one = torch.zeros(3, 1)
    with pytest.raises(ValueError, match="at least 2 responses per prompt, got 1"):
        trajectory_balance(one, one, one, beta=BETA)


@pytest.mark.parametrize("beta", [0.0, -1.0, math.inf, math.nan])
def test_beta_must_be_positive_and_finite(beta):
    zeros = torch.zeros(1, 2)
    with pytest.raises(ValueError, match=f"beta must be positive and finite, got {beta}"):
        trajectory_balance(zeros, zeros, zeros, beta=beta)


def test_tensors_of_different_shapes_are_refused():
    with pytest.raises(ValueError, match=r"\(2, 3\), \(2, 3\) and \(6,\)"):
        trajectory_balance(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(6), beta=BETA)


def test_no_prompts_are_refused():
    empty = torch.zeros(0, 2)
    with pytest.raises(ValueError, match="at least 1 prompt"):
        trajectory_balance(empty, empty, empty, beta=BETA)


def test_metrics_and_residuals_carry_no_gradient():
    logits, chosen_PK = parameters(2), toy.draw(13, 2, 3)
    loss = loss_of(logits, chosen_PK, toy.ALL_DIFFER_N[chosen_PK])
    assert loss.value.requires_grad
    assert not any(t.requires_grad for t in (*loss.metrics.values(), loss.residual_PK, loss.log_z_P))
    assert_close(loss.metrics["log_z"], loss.log_z_P.mean())
