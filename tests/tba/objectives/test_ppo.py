"""PPO: its mathematical properties token by token, and a learner that trains a value model with the policy."""
# Shapes: P prompts, K responses per prompt, T tokens, N sequences of the toy of L tokens, R its prefixes.

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.harness import toy
from benchmarks.harness.tiny_models import tiny_llama, tiny_policy, tiny_tokenizer
from tba.config import Config
from tba.models.policy import Policy
from tba.objectives import Groups
from tba.objectives.policy_gradient import policy_gradient
from tba.objectives.ppo import PPO, gae, token_rewards, value_loss, whiten
from tba.objectives.rloo import ProximalRLOO
from tba.train.auxiliary_models import ValueModel
from tba.train.learner import Learned, Learner
from tba.types import Trajectory
from tests.support.tba.objective_examples import BETA, REF_NL, assert_close, given_tokens, gradient, parameters
from tests.support.tba.trainers import PROMPTS, RESPONSES, Buffer, Journal, settings

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
    rows_N, mass_NL = toy.PREFIX_ROWS_NL.flatten(), REF_NL.sum(1).exp()[:, None].expand(-1, toy.L)
    tilted_R, mass_R = (
        torch.zeros(toy.R, dtype=torch.float64).index_add(0, rows_N, it.flatten())
        for it in (mass_NL * (reward_N / BETA).exp()[:, None], mass_NL)
    )
    value_NL = BETA * (tilted_R / mass_R).log()[toy.PREFIX_ROWS_NL]
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


# --- a learner with a value model -------------------------------------------------------------------------------------


def precise_policy() -> Policy:
    return Policy(tiny_llama().double(), tiny_tokenizer(), torch.device("cpu"))  # pyright: ignore[reportArgumentType]


def settings_of(**changes: Any) -> Config:
    return settings(objective__name="ppo", **changes)


def take(learner: Learner, step: int) -> Learned:
    buffer = Buffer(Journal())
    return learner.learn(step, learner.collate(buffer.fetch(buffer.draw(step))))


def value_model(learner: Learner) -> ValueModel:
    assert learner.auxiliary is not None and isinstance(learner.auxiliary.model, ValueModel)
    return learner.auxiliary.model


def test_the_value_model_begins_as_the_policy_with_a_head_of_zeros_and_does_not_move_it():
    policy = tiny_policy()
    learner = Learner(settings_of(), policy)
    backbone, model = dict(value_model(learner).backbone.named_parameters()), policy.model.base_model
    assert backbone.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(backbone[name], parameter) and backbone[name].data_ptr() != parameter.data_ptr()
    assert take(learner, 1).metrics["explained_variance"] == pytest.approx(0, abs=1e-6)


def by_hand(learner: Learner) -> tuple[Tensor, list[Tensor], float]:
    """Compute by hand, row by row, the loss of a step, the whitened advantages and the explained variance."""
    config, policy, model = learner.config.objective, learner.policy.model, value_model(learner)
    buffer = Buffer(Journal())
    found = []
    for row in buffer.trajectories(buffer.draw(1)):
        tokens_T = torch.tensor([*row.prompt_tokens, *row.response_tokens])
        before_T = range(len(row.prompt_tokens) - 1, len(tokens_T) - 1)
        hidden_TD = model.backbone(tokens_T[None]).last_hidden_state[0]
        value_T = torch.stack([hidden_TD[t] @ model.head.weight_D + model.head.bias for t in before_T])
        logps_TV = torch.log_softmax(policy(tokens_T[None]).logits[0], dim=-1)
        logp_T = torch.stack([logps_TV[t, tokens_T[t + 1]] for t in before_T])
        found.append((logp_T, value_T, *targets(row, logp_T.tolist(), value_T.tolist(), config)))
    everything_N, return_N = (torch.cat([it[i] for it in found]) for i in (2, 3))
    values_N = torch.cat([it[1] for it in found])
    mean, deviation = everything_N.mean(), (everything_N.var() + 1e-8).sqrt()
    white = [(it[2] - mean) / deviation for it in found]
    gained = [
        torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        for (logp_T, *_), advantage in zip(found, white, strict=True)
        for ratio in [(logp_T + 4.0).exp()]
    ]
    loss = -torch.cat(gained).mean() + config.value_share / 2 * (values_N - return_N).square().mean()
    explained = 1 - (return_N - values_N).var() / return_N.var()
    return loss, white, float(explained.detach())


def targets(row: Trajectory, logps: list[float], values: list[float], config: Any) -> tuple[Tensor, Tensor]:
    """Return advantages and returns, computed from the last token backwards."""
    advantage, following, found = 0.0, 0.0, list[float]()
    for t in reversed(range(len(logps))):
        reward = -config.beta_start * (logps[t] - row.ref_logps[t]) + (row.reward if t == len(logps) - 1 else 0.0)
        advantage = reward + config.discount * following - values[t] + config.discount * config.gae_decay * advantage
        following = values[t]
        found.insert(0, advantage)
    advantage_T = torch.tensor(found, dtype=torch.float64)
    return advantage_T, advantage_T + torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_however_the_batch_is_cut_policy_and_value_model_get_the_gradients_of_the_whole(groups):
    config = settings_of(
        objective__discount=0.97, objective__gae_decay=0.8, objective__value_share=0.5,
        training__groups_per_micro_batch=groups,
    )  # fmt: skip
    learner = Learner(config, precise_policy())
    model = value_model(learner)
    with torch.no_grad():
        model.head.weight_D.copy_(toy.random_rewards(1, len(model.head.weight_D)) - 0.5)
    loss, white, explained = by_hand(learner)
    both = [*learner.policy.model.parameters(), *model.parameters()]
    expected = torch.autograd.grad(loss, both)
    learned = take(learner, 1)
    for parameter, wanted in zip(both, expected, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-5, atol=1e-8)
    assert learned.metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert learned.metrics["explained_variance"] == pytest.approx(explained, rel=1e-4, abs=1e-6)
    of_policy, of_values = expected[: -len(list(model.parameters()))], expected[-len(list(model.parameters())) :]
    for name, gradients in (("grad_norm", of_policy), ("value_grad_norm", of_values)):
        assert learned.metrics[name] == pytest.approx(float(torch.nn.utils.get_total_norm(gradients)), rel=1e-5)
    assert [it.advantage for it in learned.outcomes] == pytest.approx([float(it.mean()) for it in white], rel=1e-4)


def test_values_learn_what_returns_can_be_foretold():
    config = settings_of(
        objective__value_learning_rate=3e-3, training__learning_rate=1e-9, training__schedule="constant",
        training__stable_steps=None, training__decay_steps=0,
    )  # fmt: skip
    learner = Learner(config, tiny_policy())
    explained = [take(learner, step).metrics["explained_variance"] for step in range(1, 41)]
    assert explained[0] == pytest.approx(0, abs=1e-6) and explained[-1] > 0.5, explained


def test_the_value_model_has_a_learning_rate_of_its_own_on_the_same_schedule():
    def moved(step: int, **changes: float) -> tuple[float, float]:
        """Return the largest change of the first weights and of the head's bias. At Adam's first step, this is the
        rate."""
        options = {"training__learning_rate": 1e-4, "training__warmup_steps": 4, **changes}
        learner = Learner(settings_of(training__steps=100, training__decay_steps=50, **options), tiny_policy())
        model = value_model(learner)
        before = [it.detach().clone() for it in (next(learner.policy.model.parameters()), model.head.bias)]
        take(learner, step)
        after = (next(learner.policy.model.parameters()), model.head.bias)
        policy, bias = (float((b - a).detach().abs().max()) for a, b in zip(before, after, strict=True))
        return policy, bias

    assert moved(50) == pytest.approx((1e-4, 1e-4), rel=1e-2)
    assert moved(50, objective__value_learning_rate=3e-3) == pytest.approx((1e-4, 3e-3), rel=1e-2)
    assert moved(1, objective__value_learning_rate=3e-3) == pytest.approx((1e-4 / 4, 3e-3 / 4), rel=1e-2)


def test_each_of_the_two_is_clipped_by_its_own_norm():
    config = settings_of(
        training__clip_norm=1e-3, training__adam_eps=1.0, training__adam_beta1=0.0, training__adam_beta2=0.0,
        training__learning_rate=1.0, training__schedule="constant", training__warmup_steps=0,
        training__stable_steps=None, training__decay_steps=0,
    )  # fmt: skip
    learner = Learner(config, precise_policy())
    models = (learner.policy.model, value_model(learner))
    before = [[p.detach().clone() for p in model.parameters()] for model in models]
    take(learner, 1)
    for model, was in zip(models, before, strict=True):
        moved = torch.cat([(p.detach() - q).flatten() for p, q in zip(model.parameters(), was, strict=True)])
        assert float(moved.norm()) == pytest.approx(1e-3, rel=1e-2)


def test_a_step_that_is_not_finite_updates_neither():
    learner = Learner(settings_of(), tiny_policy())
    buffer = Buffer(Journal(), {1: math.nan})
    before = {name: p.detach().clone() for name, p in value_model(learner).named_parameters()}
    policy = learner.policy.snapshot().sha256
    learned = learner.learn(1, learner.collate(buffer.fetch(buffer.draw(1))))
    assert learned.skipped == "step 1: loss nan with gradient norm nan and nan; no weight was updated"
    assert learner.policy.snapshot().sha256 == policy
    assert all(torch.equal(p, before[name]) for name, p in value_model(learner).named_parameters())


@pytest.mark.parametrize(("reset_optimizer", "counted"), [(False, 5), (True, 2)])
def test_where_the_optimizer_forgets_so_does_that_of_the_value_model(reset_optimizer, counted):
    config = settings_of(objective__reference_reset=3, objective__reset_optimizer=reset_optimizer)
    learner = Learner(config, tiny_policy())
    for step in range(1, 6):
        take(learner, step)
    state = learner.state(step=5, sync=3).auxiliary or {}
    assert {float(it) for name, it in state.items() if name.endswith(".step")} == {counted}


@pytest.mark.parametrize("before", [{}, {"objective__log_z": "learned"}])
def test_from_a_checkpoint_without_values_they_begin_with_the_policy_as_it_is(before):
    older = Learner(settings(**before), tiny_policy())
    take(older, 1)
    learner = Learner(settings_of(), older.policy)
    learner.restore(older.state(step=1, sync=1))
    values = dict(value_model(learner).backbone.named_parameters())
    for name, parameter in older.policy.model.base_model.named_parameters():
        assert torch.equal(values[name], parameter)
    assert take(learner, 2).metrics["value_grad_norm"] > 0


def test_the_batch_is_whitened_and_not_its_parts():
    learned = take(Learner(settings_of(training__groups_per_micro_batch=1), tiny_policy()), 1)
    buffer = Buffer(Journal())
    lengths = [row.length for row in buffer.trajectories(buffer.draw(1))]
    sums = [it.advantage * n for it, n in zip(learned.outcomes, lengths, strict=True)]
    assert sum(sums) == pytest.approx(0, abs=1e-4)
    assert max(abs(sum(sums[i : i + RESPONSES])) for i in range(0, PROMPTS * RESPONSES, RESPONSES)) > 0.5
