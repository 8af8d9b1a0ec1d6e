"""REINFORCE: the advantage of a response is its reward minus the mean reward of the batch.

    L = - mean of A log pi(y|x),      A = r - beta log(pi / ref) - mean of r over the batch

The baseline averages rewards without the penalty, because rewards are known before the step and the penalty is not.
Left out: a moving average of past batches as baseline. The gradient estimate is unbiased only on policy.
"""

from __future__ import annotations

from typing import Literal

from tba.objectives.groups import Groups, Loss
from tba.objectives.policy_gradients.policy_loss import PolicyGradient, policy_gradient, rewards
from tba.settings import settings
from tba.types import Level, Penalty


@settings
class Reinforce(PolicyGradient):
    """REINFORCE with the mean reward of the batch as its baseline."""

    name: Literal["reinforce"] = "reinforce"
    correction_level: Level = "token"
    penalty: Penalty = "reward"

    def loss(self, groups: Groups, *, beta: float) -> Loss:
        if groups.batch_reward is None:
            raise ValueError("REINFORCE needs batch_reward, the mean reward of the batch, as its baseline, got None")
        advantage_PK = rewards(groups, self, beta=beta) - groups.batch_reward
        return policy_gradient(groups, advantage_PK, self, beta=beta)
