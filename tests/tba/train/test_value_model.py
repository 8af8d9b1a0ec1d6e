"""A learner that trains a value model with the policy, for PPO."""
# Shapes: T tokens of a response, D the width of the hidden states, V the vocabulary, N tokens of all responses.

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.harness import toy
from benchmarks.harness.tiny_models import tiny_llama, tiny_policy, tiny_tokenizer
from tba.config import Config
from tba.models.policy import Policy
from tba.train.auxiliary_models import ValueModel
from tba.train.learner import Learned, Learner
from tba.types import Trajectory
from tests.support.tba.trainers import PROMPTS, RESPONSES, Buffer, Journal, settings


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


def test_the_penalty_in_the_advantages_is_to_the_reference_as_it_is_now():
    """The reference is reset to the policy right before the step, so the log-ratio is 0."""

    def advantages(**changes: Any) -> list[float | None]:
        return [it.advantage for it in take(Learner(settings_of(**changes), tiny_policy()), 2).outcomes]

    without = pytest.approx(advantages(objective__penalty="none"), abs=1e-4)
    assert advantages(objective__reference_reset=1) == without != advantages()
