"""GRPO (arXiv:2402.03300) and Dr. GRPO (arXiv:2503.20783). Both compare rewards within a group and clip the ratio of
each token as in PPO.

    GRPO        A = (r - mean of r) / (std of r + 1e-4), the mean over each response's tokens, and beta k3 in the loss
    Dr. GRPO    A = r - mean of r, the sum over tokens divided by a constant, no penalty

std has the divisor K - 1. Dividing by std gives more weight to prompts whose rewards differ little, and the mean over
a response's own tokens favours short right answers and long wrong ones. Dr. GRPO leaves out both.

The loss of ScaleRL (arXiv:2510.13786) is GRPO with `standardised_by="batch"`, `normaliser="group"`, no penalty, and
`correction="cispo"` with `clip_low=1`: one ratio bound for all tokens, and each prompt counts alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import model_validator

from tba.objectives.groups import Groups, Loss
from tba.objectives.policy_gradients.policy_loss import GroupPolicyGradient, centred, policy_gradient, rewards
from tba.settings import settings
from tba.types import CorrectionKind, Level, Normaliser, Penalty

if TYPE_CHECKING:
    from torch import Tensor

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
    standardised_by: Literal["group", "batch"] = "group"
    """Where the standard deviation comes from by which advantages are divided. `group`: the rewards of the group.
    `batch`: the advantages of the whole batch, so that prompts with little difference in rewards count little. This
    needs `penalty` other than `reward`."""

    def loss(self, groups: Groups, *, beta: float) -> Loss:
        reward_PK = rewards(groups, self, beta=beta)
        if self.standardised_by == "group":
            return policy_gradient(groups, standardised(reward_PK), self, beta=beta)
        if groups.batch_spread is None:
            raise ValueError("objective.standardised_by = 'batch' needs batch_spread, which the batch does not have")
        return policy_gradient(groups, centred(reward_PK) / (groups.batch_spread + EPSILON), self, beta=beta)

    @model_validator(mode="after")
    def _the_spread_of_a_batch_is_known_before_the_step(self) -> Self:
        if self.standardised_by == "batch" and self.penalty == "reward":
            raise ValueError(
                "objective.standardised_by must be 'group' where objective.penalty is 'reward', got 'batch': the "
                "penalty of a batch is not known before its step"
            )
        return self


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


def standardised(reward_PK: Tensor) -> Tensor:
    """Return the rewards of each group, shifted to mean 0 and divided by their standard deviation."""
    return centred(reward_PK) / (reward_PK.std(dim=1, keepdim=True) + EPSILON)
