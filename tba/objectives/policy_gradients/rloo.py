"""RLOO: the reward of a response is compared with the mean reward of the other responses of its group (leave-one-out).

    L = - mean of A log pi(y|x),      A_i = R_i - mean of R_j over j != i = K / (K - 1) (R_i - mean of R)

with R = r - beta log(pi / ref), where pi is the current policy. The gradient is therefore that of trajectory balance
with leave-one-out log Z, times beta / 2, whichever policy sampled the responses. Without the penalty this does not
hold, and the gradient estimate is right only on policy. A shift of the baseline is subtracted from A. Below 0, without
penalty and ratio, it gives AsymRE (arXiv:2506.20520), which is made for old data.

Proximal RLOO is for data of another policy. It maximises min(rho A, clip(rho) A), where A uses the reward without
penalty, and rho = pi(y|x) / mu(y|x) is the ratio of the whole response to the policy mu that sampled it. Released code
takes the ratio to the policy at the start of the update; here that ratio would be 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from tba.objectives.groups import Groups, Loss
from tba.objectives.policy_gradients.policy_loss import (
    GroupPolicyGradient,
    PolicyGradient,
    centred,
    policy_gradient,
    rewards,
)
from tba.settings import settings
from tba.types import CorrectionKind, Level, Penalty

if TYPE_CHECKING:
    from torch import Tensor


@settings
class RLOO(GroupPolicyGradient):
    """REINFORCE with a leave-one-out baseline."""

    name: Literal["rloo"] = "rloo"
    correction_level: Level = "token"
    penalty: Penalty = "reward"
    baseline_shift: Annotated[float, Field(ge=-1e3, le=1e3)] = 0.0
    """Amount added to the mean reward with which a response is compared. Negative values let good responses weigh more
    than bad ones, which is safer with old data. 0 is plain RLOO."""

    def has_no_gradient(self, reward_PK: Tensor, equal_P: Tensor) -> Tensor:
        return super().has_no_gradient(reward_PK, equal_P) & (self.baseline_shift == 0)

    def loss(self, groups: Groups, *, beta: float) -> Loss:
        return _rloo(groups, self, beta, shift=self.baseline_shift)


@settings
class ProximalRLOO(GroupPolicyGradient):
    """RLOO with the clipped importance ratio of whole responses."""

    name: Literal["proximal-rloo"] = "proximal-rloo"
    correction: CorrectionKind = "clip"
    correction_level: Level = "response"
    penalty: Penalty = "none"

    def loss(self, groups: Groups, *, beta: float) -> Loss:
        return _rloo(groups, self, beta)


def _rloo(groups: Groups, objective: PolicyGradient, beta: float, *, shift: float = 0.0) -> Loss:
    k = groups.reward_PK.shape[1]
    advantage_PK = k / (k - 1) * centred(rewards(groups, objective, beta=beta)) - shift
    return policy_gradient(groups, advantage_PK, objective, beta=beta)
