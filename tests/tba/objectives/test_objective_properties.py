"""Properties that all objectives or several of them have, and what their settings choose."""
# Shapes: P prompts, K responses per prompt, T tokens, N sequences of the toy, R x V its logits.

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.harness import toy
from tba.objectives import OBJECTIVES, Groups, TrajectoryBalance, trajectory_balance
from tba.objectives.policy_gradients.corrections import Correction
from tba.objectives.policy_gradients.grpo import GRPO, DrGRPO
from tba.objectives.policy_gradients.reinforce import Reinforce
from tests.support.tba.objective_examples import (
    BETA,
    GRADIENTS,
    OLD_NL,
    VALUE_NL,
    after,
    assert_close,
    estimated,
    given_tokens,
    gradient,
    groups_of,
    named,
    parameters,
    scores_of,
)

NAMES = list(OBJECTIVES)


# --- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_order_padding_and_a_constant_added_to_rewards_change_nothing(name: str, seed: int):
    """The constant is also added to values between steps, because these are estimated from rewards, and to the values
    of sub-trajectory balance, which are part of its residuals."""
    chosen = {"gae_decay": 1.0} if name == "ppo" else {}  # otherwise, a constant counts less for early tokens
    objective, logits = named(name, **chosen), parameters()
    chosen_PK, reward_PK = toy.draw(seed, 3, 4), toy.random_rewards(seed, 3, 4)
    plain = objective(groups_of(logits, chosen_PK, reward_PK, old_NL=OLD_NL), beta=BETA)
    order_P, order_K = torch.tensor([2, 0, 1]), torch.tensor([3, 1, 0, 2])

    def arranged(rows: Tensor) -> Tensor:
        return rows[order_P][:, order_K]

    other = objective(groups_of(logits, arranged(chosen_PK), arranged(reward_PK), old_NL=OLD_NL), beta=BETA)
    assert_close(other.value, plain.value)
    assert_close(other.advantage_PK, arranged(plain.advantage_PK))
    raised = groups_of(logits, chosen_PK, reward_PK + 7.0, old_NL=OLD_NL)
    values_PKT = VALUE_NL[chosen_PK] + 7.0
    learned_PKT = raised.needed("value_PKT") + (7.0 if name == "subtrajectory-balance" else 0.0)
    after_PKT = after(values_PKT, reward_PK + 7.0)
    raised = replace(raised, step_value_PKT=values_PKT, step_next_PKT=after_PKT, value_PKT=learned_PKT)
    shifted = objective(raised, beta=BETA)
    padded = objective(padding(groups_of(logits, chosen_PK, reward_PK, old_NL=OLD_NL)), beta=BETA)
    expected = gradient(plain, logits)
    for loss in (other, shifted, padded):
        assert_close(gradient(loss, logits), expected)


def padding(groups: Groups) -> Groups:
    """Add two columns that do not count."""
    wider = {
        name: torch.nn.functional.pad(it, (1, 1))
        for name, it in vars(groups).items()
        if isinstance(it, Tensor) and it.ndim == 3
    }
    return Groups(**{**vars(groups), **wider})


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_is_the_mean_of_its_parts(name: str):
    objective, logits = named(name), parameters()
    lengths_PK = torch.tensor([[1, 2, 3], [3, 3, 1], [2, 2, 2], [1, 1, 1]])  # so that parts differ in mean length
    chosen_PK, reward_PK = toy.draw(5, 4, 3), toy.random_rewards(5, 4, 3)
    mask_PKT = torch.arange(toy.L) < lengths_PK[:, :, None]
    whole = given_tokens(toy.token_logps(logits)[chosen_PK], OLD_NL[chosen_PK], reward_PK, mask_PKT)
    whole = estimated(OBJECTIVES[name](), whole)

    def part(rows: slice) -> Groups:
        return Groups(**{name: it[rows] if isinstance(it, Tensor) else it for name, it in vars(whole).items()})

    parts = [objective(part(rows), beta=BETA) for rows in (slice(0, 1), slice(1, 4))]
    expected = 0.25 * gradient(parts[0], logits) + 0.75 * gradient(parts[1], logits)
    assert_close(gradient(objective(whole, beta=BETA), logits), expected)


@pytest.mark.parametrize("name", [*GRADIENTS, "kimi", "oapl"])
def test_what_it_does_on_policy_is_what_its_advantages_say(name: str):
    """At pi = mu every correction is 1. Without a penalty in the loss, the gradient is the gradient of A log pi."""
    plain = {"normaliser": "sum", "penalty": "none"} if name in GRADIENTS[1:] else {}
    plain = {"normaliser": "sum"} if name == "tba-prime" else plain
    logits, chosen_PK, reward_PK = parameters(), toy.draw(6, 3, 4), toy.random_rewards(6, 3, 4)
    loss = named(name, **plain)(groups_of(logits, chosen_PK, reward_PK), beta=BETA)
    expected = -torch.einsum("pk,pkrv->rv", loss.advantage_PK, scores_of(logits, chosen_PK)) / 12
    scale = 2 * BETA if name in ("kimi", "oapl") else 1.0
    assert_close(gradient(loss, logits), scale * expected)


@pytest.mark.parametrize("name", ["rloo", "proximal-rloo", "grpo", "dr-grpo", "online-dpo"])
def test_equal_rewards_teach_nothing_without_a_reference(name: str):
    plain = {} if name == "online-dpo" else {"penalty": "none"}
    logits = parameters()
    loss = named(name, **plain)(groups_of(logits, toy.draw(7, 2, 4), torch.full((2, 4), 0.3)), beta=BETA)
    assert_close(gradient(loss, logits), torch.zeros_like(logits))
    assert loss.metrics["equal_rewards"] == 1


@pytest.mark.parametrize("name", NAMES)
def test_numbers_stay_finite_however_far_policies_are_apart(name: str):
    logp_PKT = torch.full((2, 3, 4), -0.01, dtype=torch.float64).requires_grad_()
    far_PKT, near_PKT = (torch.full((2, 3, 4), it, dtype=torch.float64) for it in (-500.0, -4.8))
    pairs = ((logp_PKT, far_PKT), (far_PKT.clone().requires_grad_(), logp_PKT.detach()), (logp_PKT, near_PKT))
    for logp, old in pairs:
        loss = named(name)(given_tokens(logp, old, toy.random_rewards(8, 2, 3)), beta=BETA)
        assert loss.value.isfinite()
        assert gradient(loss, logp).isfinite().all()


def test_what_a_batch_lacks_is_named():
    groups = groups_of(parameters(), toy.draw(1, 2, 3), toy.random_rewards(1, 2, 3))
    lacking = Groups(**{**vars(groups), "behaviour_logp_PKT": None, "batch_reward": None})
    with pytest.raises(ValueError, match="this objective needs behaviour_logp_PKT"):
        GRPO().loss(lacking, beta=BETA)
    with pytest.raises(ValueError, match="mean reward of the batch"):
        Reinforce().loss(lacking, beta=BETA)
    with pytest.raises(ValueError, match="'clip' needs log-probabilities of the sampling policy, got None"):
        Correction(kind="clip").maximised(groups.logp_PK, None, groups.reward_PK)
    with pytest.raises(ValueError, match="needs the maximum length of a response, got None"):
        DrGRPO().loss(replace(groups, max_tokens=None), beta=BETA)
    with pytest.raises(ValueError, match=r"reward_PK must have the shape \[2, 3\], to fit logp_PKT, got \[3, 2\]"):
        Groups(**{**vars(groups), "reward_PK": torch.zeros(3, 2)})
    with pytest.raises(ValueError, match="at least 2 responses per prompt, got 1"):
        groups_of(parameters(), toy.draw(1, 2, 1), torch.zeros(2, 1))


# --- what settings choose ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "direct"),
    [
        ({"log_z": "leave-one-out"}, lambda it: trajectory_balance(
            it.logp_PK, it.ref_logp_PK, it.reward_PK, beta=BETA, log_z="leave-one-out")),
        ({"anchor": "behaviour"}, lambda it: trajectory_balance(
            it.logp_PK, it.behaviour_logp_PKT.sum(2), it.reward_PK, beta=BETA)),
        ({"log_z": "learned"}, lambda it: trajectory_balance(
            it.logp_PK, it.ref_logp_PK, it.reward_PK, beta=BETA, log_z=it.log_z_P)),
    ],
)  # fmt: skip
def test_settings_choose_how_trajectory_balance_is_computed(chosen: dict[str, Any], direct: Any):
    logits = parameters()
    groups = groups_of(logits, toy.draw(24, 3, 4), toy.random_rewards(24, 3, 4), old_NL=OLD_NL)
    groups = replace(groups, log_z_P=torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64))
    loss, expected = TrajectoryBalance(**chosen).loss(groups, beta=BETA), direct(groups)
    assert_close(loss.value, expected.value)
    assert_close(gradient(loss, logits), gradient(expected, logits))
    assert not torch.equal(loss.value, TrajectoryBalance().loss(groups, beta=BETA).value)


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("tba-prime", {"centre": "behaviour"}),
        ("kimi", {"anchor": "behaviour"}),
        ("oapl", {"anchor": "reference"}),
        ("oapl", {"value_beta": 2.0}),
        ("subtrajectory-balance", {"parts": "to-end"}),
        ("subtrajectory-balance", {"part_decay": 0.5}),
        ("ppo", {"discount": 0.5}),
        ("ppo", {"gae_decay": 0.5}),
        ("ppo", {"value_share": 0.3}),
        *((name, {"normaliser": "sum"}) for name in ("tba-prime", "grpo", "dr-grpo", "ppo", "vine-ppo")),
        *((name, {"normaliser": "tokens"}) for name in ("reinforce", "rloo")),
        *((name, {"penalty": "loss"}) for name in ("reinforce", "rloo", "proximal-rloo", "dr-grpo", "ppo")),
        *((name, {"penalty": "none"}) for name in ("reinforce", "rloo", "grpo", "ppo", "vine-ppo")),
    ],
)
def test_a_setting_of_an_objective_changes_its_loss(name: str, chosen: dict[str, Any]):
    groups = groups_of(parameters(), toy.draw(24, 3, 4), toy.random_rewards(24, 3, 4), old_NL=OLD_NL)
    loss, plain = named(name, **chosen)(groups, beta=BETA), named(name)(groups, beta=BETA)
    assert not torch.equal(loss.value, plain.value)
