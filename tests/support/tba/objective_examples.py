"""Small batches, and gradients of objectives on them."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import toy
from tba.objectives import OBJECTIVES, Groups, Loss, Objective

BETA = 0.5
REF_NL, OLD_NL = (toy.token_logps(toy.random_logits(seed)) for seed in (1, 2))
VALUE_NL = toy.random_rewards(4, toy.N, toy.L)
GRADIENTS = ("tba-prime", "reinforce", "rloo", "proximal-rloo", "grpo", "dr-grpo")
"""The objectives that multiply the gradient of each response by an advantage."""


def parameters(seed: int = 3) -> Tensor:
    return toy.random_logits(seed).requires_grad_()


def groups_of(logits: Tensor, chosen_PK: Tensor, reward_PK: Tensor, *, old_NL: Tensor | None = None) -> Groups:
    """Return groups of sequences of the toy, sampled by the policy itself unless `old_NL` is given."""
    logp_NL = toy.token_logps(logits)
    behaviour_NL = logp_NL.detach() if old_NL is None else old_NL
    return Groups(
        logp_PKT=logp_NL[chosen_PK],
        mask_PKT=torch.ones(*chosen_PK.shape, toy.L, dtype=torch.bool),
        reward_PK=reward_PK,
        ref_logp_PK=REF_NL[chosen_PK].sum(dim=2),
        ref_logp_PKT=REF_NL[chosen_PK],
        behaviour_logp_PKT=behaviour_NL[chosen_PK],
        length_PK=torch.full(chosen_PK.shape, toy.L + 2),
        batch_reward=float(reward_PK.mean()),
        batch_spread=float((reward_PK - reward_PK.mean(1, True)).square().mean().sqrt()),
        batch_tokens=float(toy.L),
        max_tokens=toy.L,
        value_PKT=VALUE_NL[chosen_PK],
        step_value_PKT=VALUE_NL[chosen_PK],
        step_next_PKT=after(VALUE_NL[chosen_PK], reward_PK),
    )


def after(value_PKT: Tensor, reward_PK: Tensor) -> Tensor:
    """Return the value after each token if every token is a step: that of the next token, and the reward after the
    last."""
    return torch.cat([value_PKT[:, :, 1:], reward_PK[:, :, None]], dim=2)


def scores_of(logits: Tensor, chosen_PK: Tensor) -> Tensor:
    """[P, K, R, V] the gradient of the log-probability of each response."""
    return torch.func.jacrev(toy.sequence_logps)(logits.detach())[chosen_PK]


def given_tokens(logp_PKT: Tensor, old_PKT: Tensor, reward_PK: Tensor, mask_PKT: Tensor | None = None) -> Groups:
    """Return responses with these log-probabilities, and a reference that gives each token a probability of e^-1."""
    mask_PKT = torch.ones_like(logp_PKT, dtype=torch.bool) if mask_PKT is None else mask_PKT
    ref_PKT = -mask_PKT.double()
    return Groups(
        logp_PKT=logp_PKT * mask_PKT,
        mask_PKT=mask_PKT,
        reward_PK=reward_PK,
        ref_logp_PK=ref_PKT.sum(dim=2),
        ref_logp_PKT=ref_PKT,
        behaviour_logp_PKT=old_PKT * mask_PKT,
        length_PK=mask_PKT.sum(dim=2) + 2,
        batch_reward=float(reward_PK.mean()),
        batch_spread=float((reward_PK - reward_PK.mean(1, True)).square().mean().sqrt()),
        batch_tokens=float(mask_PKT.sum()) / reward_PK.numel(),
        max_tokens=toy.L,
        value_PKT=0.3 * mask_PKT.double(),
        step_value_PKT=0.3 * mask_PKT.double(),
        step_next_PKT=reward_PK[:, :, None] * mask_PKT,
    )


def gradient(loss: Loss, to: Tensor) -> Tensor:
    return torch.autograd.grad(loss.value, to, retain_graph=True)[0]


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def named(name: str, **chosen: Any) -> Any:
    """Return the loss of an objective, with its estimates over the whole batch, unless the groups have them."""
    objective = OBJECTIVES[name](**chosen)
    return lambda groups, beta: objective.loss(estimated(objective, groups), beta=beta)


def estimated(objective: Objective, groups: Groups) -> Groups:
    if not objective.needs_whole_batch or groups.advantage_PKT is not None:
        return groups
    return objective.estimates(groups, beta=BETA).of(0, groups)
