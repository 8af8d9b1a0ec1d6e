"""VinePPO (arXiv:2410.01679): PPO's policy loss with Monte-Carlo values of the states between reasoning steps, and
without a critic.

    A_t = V(after the reasoning step of token t) - V(before it),    V after the last step is the reward

    L = - mean over tokens of min(rho A, clip(rho, 1 - low, 1 + high) A) + beta k3,    A whitened over the batch

Values were estimated when the response was sampled. Each is the mean reward of continuations by the policy that sampled
the response. The advantages of a response, one per reasoning step, add up to r - V(prompt). On policy, the gradient is
the policy gradient in expectation, because each value is an unbiased estimate that does not depend on the rest of the
response. A state whose value was not estimated has the reward as its value. From such a state on, advantages are 0
before whitening, so the reasoning steps after it teach only what whitening adds.

Left out: the paper clips k3 to [0, 10] at each token and sums over a response's tokens. Here the penalty is a mean like
the rest of the loss, and the log-ratios are clipped.
"""

from __future__ import annotations

from typing import Literal

from tba.objectives.groups import Estimates, Groups, Loss
from tba.objectives.policy_gradients.policy_loss import PolicyGradient, policy_gradient
from tba.objectives.policy_gradients.ppo import explained, whiten
from tba.settings import settings
from tba.types import CorrectionKind, Normaliser


@settings
class VinePPO(PolicyGradient):
    """PPO with Monte-Carlo values in place of a value model."""

    name: Literal["vine-ppo"] = "vine-ppo"
    correction: CorrectionKind = "clip"
    normaliser: Normaliser = "tokens"
    penalty: Literal["none", "loss"] = "loss"
    """Where the KL penalty against the reference is applied: in the loss, or nowhere. It cannot be in the reward,
    because the stored values are of the task's rewards alone."""

    @property
    def needs_values(self) -> bool:
        return True

    @property
    def needs_whole_batch(self) -> bool:
        return True

    @property
    def needs_tokens(self) -> bool:
        return True

    def estimates(self, groups: Groups, *, beta: float) -> Estimates:
        """Compute whitened advantages of each token of a whole batch."""
        mask_PKT = groups.mask_PKT
        value_PKT, next_PKT = groups.needed("step_value_PKT"), groups.needed("step_next_PKT")
        reward_PKT = groups.reward_PK[:, :, None].expand_as(value_PKT)
        metrics = {"explained_variance": explained(reward_PKT[mask_PKT], value_PKT[mask_PKT])}
        return Estimates(whiten(next_PKT - value_PKT, mask_PKT), None, metrics)

    def loss(self, groups: Groups, *, beta: float) -> Loss:
        return policy_gradient(groups, groups.needed("advantage_PKT"), self, beta=beta)
