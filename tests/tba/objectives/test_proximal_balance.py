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
from tba.objectives.trajectory_balance import measured_share
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
    given = {"behaviour_logp_PK": OLD_N[None], "behaviour_share": share} if share else {}
    rows = (REF_N[None], REWARD_N[None])
    loss = trajectory_balance(mixture_N[None], *rows, beta=BETA, log_z=log_z, **given)
    assert loss.residual_PK.abs().max() < 1e-10
    at_the_target = trajectory_balance(TARGET_N[None], *rows, beta=BETA, log_z=log_z, **given)
    assert (at_the_target.residual_PK.abs().max() > 0.1) == (share > 0)


@pytest.mark.parametrize(("share", "weights"), [(0.5, "equal"), (0.5, "ratio"), ("measured", "equal")])
def test_steps_from_ever_newer_data_end_at_the_target(share, weights):
    """Each round takes gradient steps on what the policy before it sampled; the target of plain trajectory balance is
    then reached, and the round before the last is still on the way."""
    logits_N, away = OLD_N.clone().requires_grad_(), []
    for _ in range(24):
        behaviour_N = torch.log_softmax(logits_N, 0).detach()
        optimizer = torch.optim.LBFGS([logits_N], max_iter=200, line_search_fn="strong_wolfe", tolerance_grad=1e-12)

        def loss(behaviour_N: Tensor = behaviour_N, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            objective = TrajectoryBalance(behaviour_share=share, weights=weights)
            value = objective.loss(flat(torch.log_softmax(logits_N, 0), behaviour_N), beta=BETA).value
            value.backward()
            return value

        optimizer.step(loss)  # pyright: ignore[reportArgumentType]
        away.append(toy.total_variation(torch.log_softmax(logits_N, 0).detach(), TARGET_N))
    assert away[0] > 0.01 and away[-1] < 1e-4


def test_old_data_that_stays_holds_the_policy_back():
    """In the mean over groups of old and of new data, the residuals at the target are not 0."""
    old, new = (flat(TARGET_N, it) for it in (OLD_N, TARGET_N))
    found, expected = (TrajectoryBalance(behaviour_share=0.8).loss(it, beta=BETA).value for it in (old, new))
    assert expected < 1e-20 and found > 0.01


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), cap=st.sampled_from([0.1, 1.0, 50.0]))
def test_weights_keep_the_target_whoever_sampled(seed: int, cap: float):
    chosen_PK = toy.draw(seed, 3, 4)
    behaviour_N = toy.sequence_logps(toy.random_logits(seed % 1000 + 50))
    rows = flat(TARGET_N, behaviour_N, chosen_PK)
    loss = TrajectoryBalance(weights="ratio", weight_cap=cap).loss(rows, beta=BETA)
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


# --- A measured share ---


def test_a_measured_share_follows_from_how_unequal_the_ratios_of_a_group_are():
    """The ratios of the groups are 1, 1, 1, 1; 2, 2, 2, 2; 3, 1, 0, 0; and 0, 0, 0, e^40."""
    log_PK = torch.tensor([[1.0] * 4, [2.0] * 4, [3.0, 1.0, 1e-30, 1e-30], [1e-30] * 3 + [math.exp(40)]]).log()
    behaviour_PK = torch.full((4, 4), -7.0)
    assert_close(measured_share(behaviour_PK + log_PK, behaviour_PK), torch.tensor([0, 0, 1 - 16 / 10 / 4, 0.75]), 1e-6)


def test_with_a_measured_share_each_group_has_the_loss_of_its_own_share():
    logits, chosen_PK, reward_PK = parameters(), toy.draw(16, 4, 5), toy.random_rewards(17, 4, 5)
    ratio_PK = weights_of(logits, chosen_PK, math.inf)
    share_P = 1 - ratio_PK.sum(1).square() / ratio_PK.square().sum(1) / 5
    assert share_P.max() - share_P.min() > 0.1
    found = loss_of(logits, chosen_PK, reward_PK, behaviour_share="measured")
    groups = [
        loss_of(logits, chosen_PK[p : p + 1], reward_PK[p : p + 1], behaviour_share=float(share))
        for p, share in enumerate(share_P)
    ]
    assert_close(found.value, torch.stack([it.value for it in groups]).mean())
    assert_close(gradient(found, logits), torch.stack([gradient(it, logits) for it in groups]).mean(0))
    assert_close(found.advantage_PK, torch.cat([it.advantage_PK for it in groups]))
    assert_close(found.metrics["behaviour_share"], share_P.mean())


def test_on_policy_a_measured_share_is_plain_trajectory_balance():
    logits, chosen_PK, reward_PK = parameters(), toy.draw(18, 3, 4), toy.random_rewards(19, 3, 4)
    groups = groups_of(logits, chosen_PK, reward_PK)
    found, expected = (TrajectoryBalance(behaviour_share=it).loss(groups, beta=BETA) for it in ("measured", 0.0))
    assert_close(gradient(found, logits), gradient(expected, logits))


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


def test_extreme_ratios_leave_the_loss_finite_in_float32():
    logp_PK = torch.tensor([[0.0, -30.0, -40.0, -50.0], [-50.0, -50.0, -50.0, -50.0]])
    groups = Groups(
        logp_PKT=logp_PK[:, :, None].requires_grad_(),
        mask_PKT=torch.ones(2, 4, 1, dtype=torch.bool),
        reward_PK=torch.tensor([[0.0, 1.0, 1.0, 0.0]] * 2),
        ref_logp_PK=torch.full((2, 4), -5.0),
        behaviour_logp_PKT=torch.full((2, 4, 1), -0.5),
    )
    for share in SHARES:
        loss = TrajectoryBalance(weights="ratio", behaviour_share=share).loss(groups, beta=BETA)
        (gradient_PKT,) = torch.autograd.grad(loss.value, groups.logp_PKT)
        assert loss.value.isfinite() and gradient_PKT.isfinite().all()


@pytest.mark.parametrize("share", SHARES[1:])
def test_leaving_one_out_multiplies_the_residuals_of_proximal_steps_too(share):
    logits, chosen_PK, reward_PK = parameters(), toy.draw(12, 2, 4), toy.random_rewards(13, 2, 4)
    whole = loss_of(logits, chosen_PK, reward_PK, behaviour_share=share)
    left_out = loss_of(logits, chosen_PK, reward_PK, behaviour_share=share, log_z="leave-one-out")
    assert whole.residual_PK is not None and left_out.residual_PK is not None
    assert_close(left_out.residual_PK, whole.residual_PK * 4 / 3)


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


@pytest.mark.parametrize("chosen", [{"behaviour_share": 0.5}, {"behaviour_share": "measured"}, {"weights": "ratio"}])
def test_both_need_the_log_probabilities_of_what_sampled(chosen):
    assert TrajectoryBalance(**chosen).needs_tokens and not TrajectoryBalance().needs_tokens


@pytest.mark.parametrize(
    ("chosen", "named"),
    [
        ({"behaviour_share": 1.0}, "less than 1"),
        ({"weight_cap": 2.0}, r"objective\.weight_cap does not apply where objective\.weights is 'equal'"),
        ({"weights": "ratio", "log_z": "leave-one-out"}, r"objective\.log_z must be 'group' or 'learned' where"),
        ({"behaviour_share": "lag"}, "measured"),
        ({"behaviour_share": "measured", "log_z": "learned"}, r"objective\.behaviour_share must be 0 where"),
        ({"behaviour_share": 0.5, "log_z": "learned"}, r"objective\.behaviour_share must be 0 where objective\.log_z"),
        ({"behaviour_share": 0.5, "anchor": "behaviour"}, r"objective\.behaviour_share does not apply where"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused_by_name(chosen, named):
    with pytest.raises(ValidationError, match=named):
        TrajectoryBalance(**chosen)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"behaviour_share": 1.0, "behaviour_logp_PK": OLD_N[None]}, "behaviour_share must be at least 0 and below 1"),
        ({"behaviour_share": 0.5}, "log-probabilities under the sampling policy are needed exactly if"),
        ({"behaviour_logp_PK": OLD_N[None]}, "log-probabilities under the sampling policy are needed exactly if"),
        ({"weight_PK": torch.ones(toy.N)}, "weight_PK must have the shape"),
        ({"weight_PK": torch.ones(1, toy.N), "log_z": "leave-one-out"}, "must not be 'leave-one-out' with weights"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(options, named):
    with pytest.raises(ValueError, match=named):
        trajectory_balance(TARGET_N[None], REF_N[None], REWARD_N[None], beta=BETA, **options)
