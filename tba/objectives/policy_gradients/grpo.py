"""GRPO (arXiv:2402.03300) and Dr. GRPO (arXiv:2503.20783). Both compare rewards within a group and clip the ratio of
each token as in PPO.

    GRPO        A = (r - mean of r) / (std of r + 1e-4), the mean over each response's tokens, and beta k3 in the loss
    Dr. GRPO    A = r - mean of r, the sum over tokens divided by a constant, no penalty

std has the divisor K - 1. Dividing by std gives more weight to prompts whose rewards differ little, and the mean over
a response's own tokens favours short right answers and long wrong ones. Dr. GRPO leaves out both.
"""

from __future__ import annotations

from typing import Literal

from tba.objectives.groups import Groups, Loss
from tba.objectives.policy_gradients.policy_loss import GroupPolicyGradient, centred, policy_gradient, rewards
from tba.settings import settings
from tba.types import CorrectionKind, Level, Normaliser, Penalty

EPSILON = 1e-4


@settings
class GRPO(GroupPolicyGradient):
    """Group relative policy optimisation."""

    name: Literal["grpo"] = "grpo"
    correction: CorrectionKind = "clip"
    correction_level: Level = "token"
    """Level at which importance ratios are taken. `token`: one ratio per token. `response`: one ratio per response, the
    product over its tokens. `mean`: one ratio per response, the geometric mean over its tokens."""
    normaliser: Normaliser = "response"
    penalty: Penalty = "loss"
    """Where the KL penalty against the reference is applied: in the reward (`reward`), in the loss (`loss`), or nowhere
    (`none`)."""

    def loss(self, groups: Groups, *, beta: float) -> Loss:
        reward_PK = rewards(groups, self, beta=beta)
        advantage_PK = centred(reward_PK) / (reward_PK.std(dim=1, keepdim=True) + EPSILON)
        return policy_gradient(groups, advantage_PK, self, beta=beta)


@settings
class DrGRPO(GroupPolicyGradient):
    """Dr. GRPO: GRPO without the division by the standard deviation, and with a constant divisor in place of the
    length."""

    name: Literal["dr-grpo"] = "dr-grpo"
    correction: CorrectionKind = "clip"
    correction_level: Level = "token"
    normaliser: Normaliser = "constant"
    penalty: Penalty = "none"

    def loss(self, groups: Groups, *, beta: float) -> Loss:
        return policy_gradient(groups, centred(rewards(groups, self, beta=beta)), self, beta=beta)
