"""Trajectory balance that takes short steps from old data, and that weights responses by how likely they still are."""
# Shapes: P prompts, K responses per prompt, N sequences of the toy.

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from benchmarks.harness import toy
from tba.objectives import Groups, Loss, TrajectoryBalance, trajectory_balance
from tests.support.tba.objective_examples import BETA, OLD_NL, REF_NL, assert_close, gradient, groups_of, parameters

REF_N, OLD_N = REF_NL.sum(1), OLD_NL.sum(1)
REWARD_N = toy.random_rewards(3, toy.N)
TARGET_N = toy.target_logps(REF_N, REWARD_N, BETA)
SHARES = (0.0, 0.3, 0.8, 0.99)


def loss_of(logits: Tensor, chosen_PK: Tensor, reward_PK: Tensor, **chosen) -> Loss:
    return TrajectoryBalance(**chosen).loss(groups_of(logits, chosen_PK, reward_PK, old_NL=OLD_NL), beta=BETA)


def weights_of(logits: Tensor, chosen_PK: Tensor, cap: float) -> Tensor:
    return (toy.sequence_logps(logits).detach() - OLD_N).exp().clamp(max=cap)[chosen_PK]


# --- The target ---


@pytest.mark.parametrize("log_z", ["group", "leave-one-out"])
@pytest.mark.parametrize("share", SHARES)
def test_a_step_aims_at_the_geometric_mixture_of_the_target_and_what_sampled(log_z, share):
    mixture_N = torch.log_softmax((1 - share) * TARGET_N + share * OLD_N, 0)
    loss = trajectory_balance(
        mixture_N[None], REF_N[None], REWARD_N[None], beta=BETA, log_z=log_z, behaviour_logp_PK=OLD_N[None],
        behaviour_share=share,
    )  # fmt: skip
    assert loss.residual_PK.abs().max() < 1e-10
    at_the_target = trajectory_balance(
        TARGET_N[None], REF_N[None], REWARD_N[None], beta=BETA, log_z=log_z, behaviour_logp_PK=OLD_N[None],
        behaviour_share=share,
    )  # fmt: skip
    assert (at_the_target.residual_PK.abs().max() > 0.1) == (share > 0)


@pytest.mark.parametrize("weights", ["equal", "ratio"])
def test_steps_from_ever_newer_data_end_at_the_target(weights):
    """Each round minimises the loss on what the policy before it sampled."""
    share, logp_N = 0.8, OLD_N
    for _ in range(64):
        logp_N = torch.log_softmax((1 - share) * TARGET_N + share * logp_N, 0)
    groups = flat(logp_N, behaviour_N=logp_N)
    loss = TrajectoryBalance(behaviour_share=share, weights=weights).loss(groups, beta=BETA)
    assert toy.total_variation(logp_N, TARGET_N) < 1e-6
    assert loss.residual_PK is not None and loss.residual_PK.abs().max() < 1e-5


@pytest.mark.parametrize("log_z", ["group", "leave-one-out"])
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), cap=st.sampled_from([0.1, 1.0, 50.0]))
def test_weights_keep_the_target_whoever_sampled(log_z: str, seed: int, cap: float):
    chosen_PK = toy.draw(seed, 3, 4)
    behaviour_N = toy.sequence_logps(toy.random_logits(seed % 1000 + 50))
    rows = flat(TARGET_N, behaviour_N, chosen_PK)
    loss = TrajectoryBalance(weights="ratio", weight_cap=cap, log_z=log_z).loss(rows, beta=BETA)
    assert loss.residual_PK is not None and loss.residual_PK.abs().max() < 1e-9


def flat(logp_N: Tensor, behaviour_N: Tensor, chosen_PK: Tensor | None = None) -> Groups:
    """Return groups of responses of a single token. Without `chosen_PK`, one group of all sequences."""
    chosen_PK = torch.arange(toy.N)[None] if chosen_PK is None else chosen_PK
    return Groups(
        logp_PKT=logp_N[chosen_PK][:, :, None],
        mask_PKT=torch.ones(*chosen_PK.shape, 1, dtype=torch.bool),
        reward_PK=REWARD_N[chosen_PK],
        ref_logp_PK=REF_N[chosen_PK],
        ref_logp_PKT=REF_N[chosen_PK][:, :, None],
        behaviour_logp_PKT=behaviour_N[chosen_PK][:, :, None],
    )


# --- The gradient of one batch ---


@pytest.mark.parametrize("share", SHARES)
def test_loss_and_gradient_are_those_of_the_residuals_variance(share):
    logits, chosen_PK, reward_PK = parameters(), toy.draw(6, 4, 5), toy.random_rewards(7, 4, 5)
    pull_N = (1 - share) * REF_N + share * OLD_N
    f_PK = (toy.sequence_logps(logits) - pull_N)[chosen_PK] - (1 - share) * reward_PK / BETA
    expected = f_PK.var(dim=1, correction=0).mean()
    loss = loss_of(logits, chosen_PK, reward_PK, behaviour_share=share)
    assert_close(loss.value, expected)
    assert_close(gradient(loss, logits), torch.autograd.grad(expected, logits)[0])


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("cap", [0.2, 1.0, 8.0])
def test_weights_multiply_squares_and_count_in_log_z(share, cap):
    logits, chosen_PK, reward_PK = parameters(), toy.draw(8, 4, 5), toy.random_rewards(9, 4, 5)
    weight_PK = weights_of(logits, chosen_PK, cap)
    pull_N = (1 - share) * REF_N + share * OLD_N
    f_PK = (toy.sequence_logps(logits) - pull_N)[chosen_PK] - (1 - share) * reward_PK / BETA
    mean_P1 = (weight_PK * f_PK).sum(1, keepdim=True) / weight_PK.sum(1, keepdim=True)
    expected = (weight_PK * (f_PK - mean_P1).square()).mean()
    loss = loss_of(logits, chosen_PK, reward_PK, behaviour_share=share, weights="ratio", weight_cap=cap)
    assert_close(loss.value, expected)
    assert_close(gradient(loss, logits), torch.autograd.grad(expected, logits)[0])
    assert_close(loss.metrics["ratio_mean"], weights_of(logits, chosen_PK, math.inf).mean())
    assert_close(loss.metrics["ratio_cut"], (weights_of(logits, chosen_PK, math.inf) > cap).double().mean())


def test_what_the_policy_no_longer_says_counts_as_if_it_had_not_been_drawn():
    logits, chosen_PK, reward_PK = parameters(), toy.draw(10, 3, 5), toy.random_rewards(11, 3, 5)
    groups = groups_of(logits, chosen_PK, reward_PK)
    unlikely_PKT = torch.zeros_like(groups.logp_PKT)
    unlikely_PKT[:, 0] = -10.0  # per token, so the ratio of the first response is e^-30
    old = Groups(**{**vars(groups), "logp_PKT": groups.logp_PKT + unlikely_PKT})
    rest = groups_of(logits, chosen_PK[:, 1:], reward_PK[:, 1:])
    objective = TrajectoryBalance(weights="ratio")
    found, expected = (objective.loss(it, beta=BETA) for it in (old, rest))
    assert_close(gradient(found, logits), gradient(expected, logits) * 4 / 5, 1e-6)
    assert gradient(TrajectoryBalance().loss(old, beta=BETA), logits).norm() > 2 * gradient(found, logits).norm()


def test_leaving_one_out_takes_the_weighted_mean_of_the_others():
    logits, chosen_PK, reward_PK = parameters(), toy.draw(12, 2, 4), toy.random_rewards(13, 2, 4)
    weight_PK = weights_of(logits, chosen_PK, 1.0)
    f_PK = (toy.sequence_logps(logits).detach() - REF_N)[chosen_PK] - reward_PK / BETA
    loss = loss_of(logits, chosen_PK, reward_PK, weights="ratio", log_z="leave-one-out")
    assert loss.residual_PK is not None
    for p in range(2):
        for k in range(4):
            others = [i for i in range(4) if i != k]
            mean = (weight_PK[p, others] * f_PK[p, others]).sum() / weight_PK[p, others].sum()
            assert_close(loss.residual_PK[p, k], f_PK[p, k] - mean)


def test_the_advantage_of_a_proximal_step_is_in_the_units_of_the_reward():
    """On policy it is the advantage of plain trajectory balance, though the residual is shorter."""
    logits, chosen_PK, reward_PK = parameters(), toy.draw(14, 3, 4), toy.random_rewards(15, 3, 4)
    groups = groups_of(logits, chosen_PK, reward_PK)
    plain, proximal = (TrajectoryBalance(behaviour_share=it).loss(groups, beta=BETA) for it in (0.0, 0.8))
    assert_close(proximal.advantage_PK, plain.advantage_PK)
    assert plain.residual_PK is not None and proximal.residual_PK is not None
    assert_close(proximal.residual_PK, 0.2 * plain.residual_PK)


# --- Settings ---


def test_equal_responses_of_different_policies_have_a_gradient_only_with_a_behaviour_share():
    reward_PK, equal_P = torch.ones(2, 3), torch.tensor([True, True])
    assert not TrajectoryBalance(behaviour_share=0.5).has_no_gradient(reward_PK, equal_P).any()
    assert TrajectoryBalance(weights="ratio").has_no_gradient(reward_PK, equal_P).all()


@pytest.mark.parametrize("chosen", [{"behaviour_share": 0.5}, {"weights": "ratio"}])
def test_both_need_the_log_probabilities_of_what_sampled(chosen):
    assert TrajectoryBalance(**chosen).needs_tokens and not TrajectoryBalance().needs_tokens


@pytest.mark.parametrize(
    ("chosen", "named"),
    [
        ({"behaviour_share": 1.0}, "less than 1"),
        ({"weight_cap": 2.0}, r"objective\.weight_cap does not apply where objective\.weights is 'equal'"),
        ({"behaviour_share": 0.5, "log_z": "learned"}, r"objective\.behaviour_share must be 0 where objective\.log_z"),
        ({"behaviour_share": 0.5, "anchor": "behaviour"}, r"objective\.behaviour_share does not apply where"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused_by_name(chosen, named):
    with pytest.raises(ValidationError, match=named):
        TrajectoryBalance(**chosen)
