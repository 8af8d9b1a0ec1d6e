"""PPO (arXiv:1707.06347) with a value model, which predicts the return before each token.

    r_t = - beta log(pi / ref)(token t) + [t is the last] r            log-ratio under the current policy
    d_t = r_t + discount V_{t+1} - V_t                                 V is 0 after the last token
    A_t = sum over l of (discount decay)^l d_{t+l}                     generalised advantages, arXiv:1506.02438
    R_t = A_t + V_t

    L = - mean over tokens of min(rho A, clip(rho, 1 - low, 1 + high) A),    A whitened over all tokens of the batch
        + value_share / 2 x mean over tokens of max((V - R)^2, (clip(V, V_old - 0.2, V_old + 0.2) - R)^2)

rho = pi / mu is the ratio of each token to the policy that sampled it, so old data is corrected token by token. With
`discount` 1 and `penalty` `reward`, all advantages are 0, whichever policy sampled, if two things hold: pi is the
target pi_ref exp(r / beta) / Z, and V is beta log E[exp(r / beta)], where pi_ref samples the rest of the response. A
clip can stop the policy on the way there. A gradient step is one update on its batch. V_old, the value before the
update, is therefore V itself, and the value loss is never clipped in a run. We do not repeat updates on one batch, for
which both clips were made.

Advantages need the whole batch, and gradients are taken in parts of it. So `estimates` runs first, without gradients,
and its results go into the parts that `loss` gets.
"""
# Shapes: P prompts in the batch, K responses per prompt, T tokens of a row with padding.

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from tba.objectives.groups import Estimates, Groups, Loss
from tba.objectives.objective import Auxiliary
from tba.objectives.policy_gradients.policy_loss import PolicyGradient, policy_gradient
from tba.runtime.lazy_torch import torch
from tba.settings import Share, settings
from tba.types import CorrectionKind, Normaliser, Penalty

if TYPE_CHECKING:
    from torch import Tensor

VALUE_CLIP = 0.2
EPSILON = 1e-8


@settings
class PPO(PolicyGradient):
    """Proximal policy optimisation with a value model."""

    name: Literal["ppo"] = "ppo"
    correction: CorrectionKind = "clip"
    normaliser: Normaliser = "tokens"
    penalty: Penalty = "reward"
    discount: Share = 1.0
    """Discount factor per token. 1 counts a later reward in full."""
    gae_decay: Share = 0.95
    """Lambda of generalised advantage estimation. 1 uses the whole rest of the response; lower values rely more on the
    value model."""
    value_share: Annotated[float, Field(gt=0, le=1e3)] = 0.1
    """Weight of the value loss relative to the policy loss. Higher values train the value model more strongly."""
    value_learning_rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Peak learning rate of the value model, on the schedule of the policy. 0 uses `training.learning_rate`."""

    @property
    def needs_whole_batch(self) -> bool:
        return True

    @property
    def needs_tokens(self) -> bool:
        return True

    @property
    def auxiliary(self) -> Auxiliary:
        return Auxiliary("value", self.value_learning_rate)

    def estimates(self, groups: Groups, *, beta: float) -> Estimates:
        """Compute whitened advantages and returns of each token of a whole batch."""
        value_PKT, mask_PKT = groups.needed("value_PKT").detach(), groups.mask_PKT
        reward_PKT = token_rewards(groups, self, beta=beta)
        advantage_PKT = gae(reward_PKT, value_PKT, mask_PKT, discount=self.discount, decay=self.gae_decay)
        return_PKT = advantage_PKT + value_PKT * mask_PKT
        metrics = {"explained_variance": explained(return_PKT[mask_PKT], value_PKT[mask_PKT])}
        return Estimates(whiten(advantage_PKT, mask_PKT), return_PKT, metrics)

    def loss(self, groups: Groups, *, beta: float) -> Loss:
        loss = policy_gradient(groups, groups.needed("advantage_PKT"), self, beta=beta)
        value_PKT = groups.needed("value_PKT")
        value_loss_PKT = value_loss(value_PKT, value_PKT.detach(), groups.needed("return_PKT"))
        value = (value_loss_PKT * groups.mask_PKT).sum(dim=2).mean() / groups.mean_tokens
        metrics = {**loss.metrics, "value_loss": value.detach()}
        return Loss(loss.value + self.value_share * value, metrics, loss.advantage_PK)


def token_rewards(groups: Groups, objective: PolicyGradient, *, beta: float) -> Tensor:
    """Return the reward of each token, [P, K, T], without gradient. The last token that counts has the reward of the
    response. If `penalty` is `reward`, each token's KL penalty is subtracted."""
    mask_PKT = groups.mask_PKT
    last_PKT = mask_PKT & (mask_PKT.flip(2).cumsum(2).flip(2) == 1)
    reward_PKT = groups.reward_PK[:, :, None] * last_PKT
    if objective.kl_penalty != "reward":
        return reward_PKT
    return reward_PKT - beta * (groups.logp_PKT.detach() - groups.needed("ref_logp_PKT")) * mask_PKT


def gae(reward_PKT: Tensor, value_PKT: Tensor, mask_PKT: Tensor, *, discount: float, decay: float) -> Tensor:
    """Return the generalised advantage of each token, [P, K, T]. Tokens whose mask is false are skipped as if they did
    not exist, and get 0. The value after the last token is 0."""
    advantage_PKT = torch.zeros_like(value_PKT)
    next_value_PK = next_advantage_PK = torch.zeros_like(value_PKT[:, :, 0])
    for t in reversed(range(value_PKT.shape[2])):
        counts_PK, value_PK = mask_PKT[:, :, t], value_PKT[:, :, t]
        error_PK = reward_PKT[:, :, t] + discount * next_value_PK - value_PK
        advantage_PK = error_PK + discount * decay * next_advantage_PK
        next_value_PK = torch.where(counts_PK, value_PK, next_value_PK)
        next_advantage_PK = torch.where(counts_PK, advantage_PK, next_advantage_PK)
        advantage_PKT[:, :, t] = torch.where(counts_PK, advantage_PK, 0)
    return advantage_PKT


def whiten(advantage: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale to mean 0 and unbiased variance 1 over the entries where the mask is true. Other entries are
    0."""
    n = int(mask.sum())
    centred = (advantage - (advantage * mask).sum() / max(n, 1)) * mask
    return centred / (centred.square().sum() / max(n - 1, 1) + EPSILON).sqrt()


def value_loss(value: Tensor, old_value: Tensor, wanted: Tensor, *, clip: float = VALUE_CLIP) -> Tensor:
    """Return the value loss of each token: half the squared distance to `wanted`, the token's return. The distance is
    the larger of two: that of the value, and that of the value clipped to within `clip` of the old value."""
    clipped = old_value + (value - old_value).clamp(-clip, clip)
    return 0.5 * torch.maximum((value - wanted).square(), (clipped - wanted).square())


def explained(return_N: Tensor, value_N: Tensor) -> Tensor:
    """Return the share of the variance of the returns that the values explain. 1 means all of it, and a constant value
    explains 0. The result is 0 if the returns do not vary."""
    spread, left = (it.var(correction=0) if len(it) else it.sum() for it in (return_N, return_N - value_N))
    return torch.where(spread > 0, 1 - left / spread, torch.zeros_like(spread))
