"""Sub-trajectory balance and path consistency: their residuals, one by one, and where they lead."""
# Shapes: P prompts, K responses per prompt, T tokens, N sequences of the toy of L tokens, R its prefixes.

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch import Tensor

from benchmarks.harness import toy
from benchmarks.science.convergence import lead, loss_of
from tba.objectives import Groups, trajectory_balance
from tba.objectives.subtrajectory_balance import SubTrajectoryBalance
from tests.support.tba.objective_examples import BETA, REF_NL, assert_close, gradient, parameters

HOLES_PKT = torch.tensor([[[1, 1, 1, 1, 1], [0, 1, 0, 1, 0]], [[0, 0, 1, 1, 0], [1, 0, 0, 0, 0]]]).bool()
SHAPE = HOLES_PKT.shape
LOGP_PKT, REF_PKT = (-toy.random_rewards(seed, *SHAPE) * HOLES_PKT for seed in (1, 2))
VALUE_PKT, REWARD_PK = toy.random_rewards(3, *SHAPE), toy.random_rewards(4, *SHAPE[:2])


def with_holes(logp_PKT: Tensor = LOGP_PKT, value_PKT: Tensor = VALUE_PKT) -> Groups:
    return Groups(
        logp_PKT=logp_PKT,
        mask_PKT=HOLES_PKT,
        reward_PK=REWARD_PK,
        ref_logp_PKT=REF_PKT,
        ref_logp_PK=REF_PKT.sum(2),
        value_PKT=value_PKT,
    )


def parts_one_by_one(p: int, k: int) -> list[tuple[int, bool, float]]:
    """Return, for each part of a response, its number of tokens, whether it ends with the response, and its residual.
    Tokens that do not count do not exist."""
    counts = HOLES_PKT[p, k]
    values = [*(VALUE_PKT[p, k][counts] / BETA).tolist(), float(REWARD_PK[p, k]) / BETA]
    ratios = (LOGP_PKT - REF_PKT)[p, k][counts].tolist()
    return [
        (j - i, j == len(ratios), values[i] - values[j] + sum(ratios[i:j]))
        for i, j in combinations(range(len(values)), 2)
    ]


@pytest.mark.parametrize("parts", ["all", "to-end"])
@pytest.mark.parametrize("decay", [1.0, 0.5, 1e-3])
def test_the_loss_is_the_weighted_mean_of_the_squares_of_all_parts(parts, decay: float):
    means = []
    for p, k in ((p, k) for p in range(SHAPE[0]) for k in range(SHAPE[1])):
        chosen = [(decay**n, d) for n, ends, d in parts_one_by_one(p, k) if ends or parts == "all"]
        means.append(sum(weight * d**2 for weight, d in chosen) / sum(weight for weight, _ in chosen))
    loss = SubTrajectoryBalance(parts=parts, part_decay=decay).loss(with_holes(), beta=BETA)
    assert float(loss.value) == pytest.approx(sum(means) / len(means), rel=1e-10)


@pytest.mark.parametrize("parts", ["all", "to-end"])
def test_the_residual_of_a_response_is_that_of_trajectory_balance_with_the_value_of_the_prompt_as_log_z(parts):
    loss = SubTrajectoryBalance(parts=parts).loss(with_holes(), beta=BETA)
    longest_PK = [[max(parts_one_by_one(p, k))[2] for k in range(SHAPE[1])] for p in range(SHAPE[0])]
    assert loss.residual_PK is not None
    assert_close(loss.residual_PK, torch.tensor(longest_PK, dtype=torch.float64))


def test_tokens_that_do_not_count_get_no_gradient():
    logp_PKT, value_PKT = LOGP_PKT.clone().requires_grad_(), VALUE_PKT.clone().requires_grad_()
    SubTrajectoryBalance().loss(with_holes(logp_PKT, value_PKT), beta=BETA).value.backward()
    for tensor in (logp_PKT, value_PKT):
        assert tensor.grad is not None and tensor.grad[HOLES_PKT].abs().min() > 0
        assert (tensor.grad[~HOLES_PKT] == 0).all()


def test_large_values_and_log_ratios_leave_small_residuals_exact():
    """The trainer's tensors have float32. Beside values of 4096 / beta, their differences would be lost in it."""
    tokens, far, small = 2000, 4096.0, 3 * 2**-11  # float32 has a reward with it, but not g
    ratio_T = torch.full((tokens,), -2.0)
    value_T = far - BETA * 2.0 * torch.arange(tokens)  # between these, every residual is 0
    reward = far - BETA * 2.0 * tokens + BETA * small
    groups = Groups(
        logp_PKT=ratio_T.expand(1, 2, tokens),
        mask_PKT=torch.ones(1, 2, tokens, dtype=torch.bool),
        reward_PK=torch.full((1, 2), reward),
        ref_logp_PKT=torch.zeros(1, 2, tokens),
        value_PKT=value_T.expand(1, 2, tokens),
    )
    to_end = SubTrajectoryBalance(parts="to-end").loss(groups, beta=BETA)
    assert to_end.residual_PK is not None and to_end.residual_PK.flatten().tolist() == pytest.approx([-small] * 2)
    assert float(to_end.value) == pytest.approx(small**2, rel=1e-5)
    of_all = SubTrajectoryBalance(part_decay=1.0).loss(groups, beta=BETA)
    assert float(of_all.value) == pytest.approx(small**2 * tokens / (tokens * (tokens + 1) / 2), rel=1e-3)


def test_a_response_without_tokens_that_count_adds_nothing():
    mask_PKT = HOLES_PKT.clone()
    mask_PKT[0, 1] = False
    groups = replace(with_holes(), mask_PKT=mask_PKT, logp_PKT=LOGP_PKT * mask_PKT, ref_logp_PKT=REF_PKT * mask_PKT)
    for parts in ("all", "to-end"):
        loss, whole = (SubTrajectoryBalance(parts=parts).loss(it, beta=BETA) for it in (groups, with_holes()))
        assert loss.residual_PK is not None and loss.log_z_P is not None and whole.log_z_P is not None
        assert loss.residual_PK[0, 1] == 0
        assert_close(loss.log_z_P[0], VALUE_PKT[0, 0, 0] / BETA)
        assert_close(loss.log_z_P[1], whole.log_z_P[1])


def test_a_loss_is_the_mean_of_the_losses_of_its_parts():
    """The trainer takes a batch in micro-batches, each padded to the width that it needs."""
    whole = with_holes()
    narrow = slice(0, 4)  # the tokens that count of the second prompt
    parts = [
        Groups(
            logp_PKT=LOGP_PKT[p : p + 1, :, width],
            mask_PKT=HOLES_PKT[p : p + 1, :, width],
            reward_PK=REWARD_PK[p : p + 1],
            ref_logp_PKT=REF_PKT[p : p + 1, :, width],
            value_PKT=VALUE_PKT[p : p + 1, :, width],
        )
        for p, width in ((0, slice(None)), (1, narrow))
    ]
    for objective in (SubTrajectoryBalance(), SubTrajectoryBalance(parts="to-end")):
        mean = sum(objective.loss(part, beta=BETA).value for part in parts) / 2
        assert_close(objective.loss(whole, beta=BETA).value, torch.as_tensor(mean))


# --- where it leads ---------------------------------------------------------------------------------------------------


def at_the_target(reward_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the token log-probabilities of the target, and the value before each token."""
    value_NL = toy.soft_values(REF_NL, reward_N, BETA)[toy.PREFIX_ROWS_NL]
    following_NL = torch.cat([value_NL[:, 1:], reward_N[:, None]], dim=1)
    return REF_NL + (following_NL - value_NL) / BETA, value_NL


@pytest.mark.parametrize("parts", ["all", "to-end"])
@pytest.mark.parametrize("decay", [1.0, 0.3])
def test_at_the_target_every_residual_is_0_whoever_sampled(parts, decay: float):
    reward_N = toy.random_rewards(3, toy.N)
    logp_NL, value_NL = at_the_target(reward_N)
    drawn_K = toy.draw(5, 40)  # any responses, repeats included
    groups = everything(logp_NL, reward_N, value_NL, drawn_K)
    loss = SubTrajectoryBalance(parts=parts, part_decay=decay).loss(groups, beta=BETA)
    assert loss.value < 1e-24 and loss.residual_PK is not None and loss.residual_PK.abs().max() < 1e-12
    away = everything(logp_NL + 0.1 * (REF_NL - logp_NL), reward_N, value_NL, drawn_K)
    assert SubTrajectoryBalance(parts=parts, part_decay=decay).loss(away, beta=BETA).value > 1e-4


def everything(logp_NL: Tensor, reward_N: Tensor, value_NL: Tensor, drawn_K: Tensor) -> Groups:
    return Groups(
        logp_PKT=logp_NL[drawn_K][None],
        mask_PKT=torch.ones(1, len(drawn_K), toy.L, dtype=torch.bool),
        reward_PK=reward_N[drawn_K][None],
        ref_logp_PKT=REF_NL[drawn_K][None],
        value_PKT=value_NL[drawn_K][None],
    )


def test_parts_of_one_token_pull_the_policy_towards_the_soft_advantage():
    """With hardly any weight on longer parts, the loss is the mean square of V_t / beta + log pi / pi_ref - V_{t+1} /
    beta."""
    logits, reward_N = parameters(), toy.random_rewards(3, toy.N)
    value_NL = toy.random_rewards(6, toy.R)[toy.PREFIX_ROWS_NL]
    following_NL = torch.cat([value_NL[:, 1:], reward_N[:, None]], dim=1)

    logp_NL = toy.token_logps(logits)
    groups = everything(logp_NL, reward_N, value_NL, torch.arange(toy.N))
    loss = SubTrajectoryBalance(part_decay=1e-12).loss(groups, beta=BETA)
    by_hand = ((value_NL - following_NL) / BETA + logp_NL - REF_NL).square().mean()
    assert_close(gradient(loss, logits), torch.autograd.grad(by_hand, logits)[0])


@pytest.mark.parametrize("name", ["sub-trajectory balance", "path consistency"])
def test_from_data_of_any_policy_it_ends_at_the_target(name: str):
    before, after, _ = lead(loss_of(name), "uniform", 0, 1500)
    assert before > 0.3 and after < 0.005


def test_of_a_single_token_it_is_trajectory_balance_with_a_learned_log_z():
    logp_PK, ref_PK, log_z_P = -toy.random_rewards(7, 3, 4), -toy.random_rewards(8, 3, 4), toy.random_rewards(9, 3)
    reward_PK = toy.random_rewards(10, 3, 4)
    groups = Groups(
        logp_PKT=logp_PK[:, :, None],
        mask_PKT=torch.ones(3, 4, 1, dtype=torch.bool),
        reward_PK=reward_PK,
        ref_logp_PKT=ref_PK[:, :, None],
        value_PKT=(BETA * log_z_P)[:, None, None].expand(3, 4, 1),
    )
    found = SubTrajectoryBalance().loss(groups, beta=BETA)
    wanted = trajectory_balance(logp_PK, ref_PK, reward_PK, beta=BETA, log_z=log_z_P)
    assert_close(found.value, wanted.value)
    assert_close(found.advantage_PK, wanted.advantage_PK)
    assert found.residual_PK is not None and wanted.residual_PK is not None
    assert_close(found.residual_PK, wanted.residual_PK)
    assert found.log_z_P is not None and wanted.log_z_P is not None
    assert_close(found.log_z_P, wanted.log_z_P)
