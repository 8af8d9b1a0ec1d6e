"""Trajectory balance with a log Z that is learned with the policy."""
# Shapes: P prompts, K responses per prompt, N sequences of the toy.

from typing import Any

import pytest
import torch

from benchmarks.harness import toy
from benchmarks.harness.fetched import fetched_of
from benchmarks.harness.tiny_models import EOS_ID, tiny_llama, tiny_policy, tiny_tokenizer, trajectory
from tba.batches.batching import prompt_lengths
from tba.errors import ConfigError
from tba.models.policy import Policy
from tba.objectives import Groups, trajectory_balance
from tba.train.auxiliary_models import make_auxiliary_model
from tba.train.learner import Learned, Learner
from tests.support.tba.objective_examples import BETA, REF_NL, assert_close, gradient, groups_of, named, parameters
from tests.support.tba.trainers import RESPONSES, Buffer, Journal, settings

REF_N = REF_NL.sum(1)
STILL = {
    "training__learning_rate": 1e-9, "training__schedule": "constant", "training__stable_steps": None,
    "training__decay_steps": 0, "training__adam_beta1": 0.9,
}  # fmt: skip
"""Settings with which the policy hardly changes, so that log Z can converge."""


def take(learner: Learner, step: int) -> Learned:
    buffer = Buffer(Journal())
    return learner.learn(step, learner.collate(buffer.fetch(buffer.draw(step))))


# --- the loss ---------------------------------------------------------------------------------------------------------


def test_given_the_mean_of_each_group_it_is_the_loss_that_estimates_it():
    logits, chosen_PK, reward_PK = parameters(), toy.draw(1, 3, 4), toy.random_rewards(2, 3, 4)
    groups = groups_of(logits, chosen_PK, reward_PK)
    rows = (groups.logp_PK, groups.ref_logp_PK, reward_PK)
    usual = trajectory_balance(*rows, beta=BETA)
    learned = trajectory_balance(*rows, beta=BETA, log_z=usual.log_z_P)
    assert_close(learned.value, usual.value)
    assert_close(gradient(learned, logits), gradient(usual, logits))


def test_log_z_is_drawn_to_the_mean_and_the_policy_sees_it_as_a_constant():
    logits, chosen_PK, reward_PK = parameters(), toy.draw(1, 3, 4), toy.random_rewards(2, 3, 4)
    log_z_P = toy.random_rewards(3, 3).requires_grad_()
    plain = groups_of(logits, chosen_PK, reward_PK)
    groups = Groups(**{**vars(plain), "log_z_P": log_z_P})
    loss = named("trajectory-balance", log_z="learned")(groups, beta=BETA)
    f_PK = (plain.logp_PK - plain.ref_logp_PK - reward_PK / BETA).detach()
    residual_PK = log_z_P.detach()[:, None] + f_PK
    assert loss.residual_PK is not None and loss.log_z_P is not None
    assert_close(loss.residual_PK, residual_PK)
    assert_close(loss.value, residual_PK.square().mean())
    assert_close(gradient(loss, log_z_P), 2 * residual_PK.mean(1) / 3)
    constant = (log_z_P.detach()[:, None] + plain.logp_PK - plain.ref_logp_PK - reward_PK / BETA).square().mean()
    assert_close(gradient(loss, logits), torch.autograd.grad(constant, logits)[0])
    assert_close(loss.advantage_PK, -BETA * residual_PK)
    assert float(loss.metrics["residual_mean"]) == pytest.approx(float(residual_PK.mean()))
    assert not loss.log_z_P.requires_grad


def test_it_converges_to_the_true_log_z_while_the_policy_does_to_the_target():
    """The data is every sequence once, independent of the policy."""
    logits = toy.random_logits(1).requires_grad_()  # the reference itself
    log_z_1 = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logits, log_z_1], lr=0.02)
    everything = torch.arange(toy.N)[None]
    for _ in range(3000):
        optimizer.zero_grad()
        logp_PK = toy.sequence_logps(logits)[everything]
        trajectory_balance(
            logp_PK, REF_N[everything], toy.ALL_DIFFER_N[everything], beta=BETA, log_z=log_z_1
        ).value.backward()
        optimizer.step()
    target_N = toy.target_logps(REF_N, toy.ALL_DIFFER_N, BETA)
    assert toy.total_variation(toy.sequence_logps(logits.detach()), target_N) < 1e-3
    log_z = float(torch.logsumexp(REF_N + toy.ALL_DIFFER_N / BETA, dim=0))
    assert float(log_z_1.detach()) == pytest.approx(log_z, abs=1e-3)


# --- a learner --------------------------------------------------------------------------------------------------------


def test_beside_a_policy_that_stays_log_z_becomes_the_mean_of_each_prompts_group():
    learner = Learner(settings(objective__log_z="learned", objective__log_z_learning_rate=0.05, **STILL), tiny_policy())
    first = take(learner, 1)
    assert {it.log_z for it in first.outcomes} == {0.0}
    for step in range(2, 101):
        last = take(learner, step)
    found = [last.outcomes[i : i + RESPONSES] for i in range(0, len(last.outcomes), RESPONSES)]
    beta = learner.config.objective.beta_start
    buffer = Buffer(Journal())
    rewards = iter(row.reward for row in buffer.trajectories(buffer.draw(1)))
    means = [sum(next(rewards) / beta - it.logp + it.ref_logp for it in group) / RESPONSES for group in found]
    assert [group[0].log_z for group in found] == pytest.approx(means, abs=0.6)
    assert max(means) - min(means) > 2  # so no constant fits all of them
    assert abs(last.metrics["residual_mean"]) < 0.1 < abs(first.metrics["residual_mean"])


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_it_is_linear_in_the_mean_state_of_the_prompt_however_the_batch_is_cut(groups):
    config = settings(objective__log_z="learned", training__groups_per_micro_batch=groups)
    policy = Policy(tiny_llama().double(), tiny_tokenizer(), torch.device("cpu"))  # pyright: ignore[reportArgumentType]
    learner = Learner(config, policy)
    assert learner.auxiliary is not None
    head = learner.auxiliary.model.head
    with torch.no_grad():
        head.weight_D.copy_(toy.random_rewards(1, len(head.weight_D)) - 0.5)
        head.bias.fill_(2.0)
    weight_D, bias = head.weight_D.detach().clone(), 2.0
    states = []
    for slot in range(3):  # prompts of the buffer
        hidden_TD = policy.model.base_model(torch.tensor([[4 + slot, 13]])).last_hidden_state[0].detach()
        states.append(hidden_TD.mean(dim=0))
    learned = take(learner, 1)
    found = [it.log_z for it in learned.outcomes[::RESPONSES]]
    assert found == pytest.approx([float(it @ weight_D) + bias for it in states], rel=1e-6)
    residual_P = torch.tensor([it.residual for it in learned.outcomes], dtype=torch.float64).view(3, -1).mean(1)
    assert head.weight_D.grad is not None and head.bias.grad is not None
    torch.testing.assert_close(head.weight_D.grad, 2 / 3 * residual_P @ torch.stack(states), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(head.bias.grad, 2 * residual_P.mean(), rtol=1e-5, atol=1e-7)
    norm = torch.cat([head.weight_D.grad, head.bias.grad[None]]).norm()
    assert learned.metrics["log_z_grad_norm"] == pytest.approx(float(norm))


@pytest.mark.parametrize("include_eos", [True, False])
def test_a_prompt_ends_where_its_responses_begin_to_count(include_eos: bool):
    rows: list[dict[str, Any]] = [
        {"prompt_id": "p", "prompt_tokens": (4, 13, 7), "response_tokens": (EOS_ID,)},
        {"prompt_id": "p", "prompt_tokens": (4, 13, 7), "response_tokens": (5, 6, EOS_ID)},
        {"prompt_id": "q", "prompt_tokens": (8,), "response_tokens": (EOS_ID,)},
        {"prompt_id": "q", "prompt_tokens": (8,), "response_tokens": (EOS_ID,)},
    ]
    learner = Learner(settings(objective__include_eos=include_eos), tiny_policy())
    assert prompt_lengths(learner.collate(fetched_of([trajectory(**row) for row in rows]))).tolist() == [3, 1]


@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        ({"objective__log_z": "learned"}, r"objective\.log_z: a learned log Z .* has none, got 'learned'"),
        ({"objective__name": "ppo"}, r"objective\.name: a value model .* has none, got 'ppo'"),
    ],
)
def test_a_policy_without_a_backbone_is_refused(chosen: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        make_auxiliary_model(settings(**chosen), Policy(tiny_llama().base_model, tiny_tokenizer(), torch.device("cpu")))
