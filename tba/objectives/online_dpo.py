"""Online DPO: in each group, the response with the highest reward is preferred to the one with the lowest reward.

    L = - log sigmoid(beta [ log(pi / ref)(best) - log(pi / ref)(worst) ]),  the mean over groups

A group whose rewards are all equal has no preference: it adds log 2 to the loss and nothing to the gradient. If several
responses share the highest or the lowest reward, the first of them is taken. The preference does not depend on the
policy that sampled the two responses.
"""
# Shapes: P prompts in the batch, K responses per prompt.

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from tba.objectives.groups import Groups, Loss, equal_rewards
from tba.objectives.objective import Objective
from tba.runtime.lazy_torch import torch
from tba.settings import settings

if TYPE_CHECKING:
    from torch import Tensor


@settings
class OnlineDPO(Objective):
    """Direct preference optimisation of the best against the worst response of each group."""

    name: Literal["online-dpo"] = "online-dpo"

    def loss(self, groups: Groups, *, beta: float) -> Loss:
        """Compute the loss from the difference between the log-ratios of the best and the worst response."""
        log_ratio_PK = groups.logp_PK - groups.needed("ref_logp_PK")
        best_P1, worst_P1 = (pick(groups.reward_PK, 1, True) for pick in (torch.argmax, torch.argmin))
        margin_P = beta * (log_ratio_PK.gather(1, best_P1) - log_ratio_PK.gather(1, worst_P1)).squeeze(1)
        # If all rewards are equal, argmax is argmin: the margin is then 0 for any policy.
        value = -torch.nn.functional.logsigmoid(margin_P).mean()
        metrics = {
            **groups.log_ratio_mean,
            "preferred": (margin_P.detach() > 0).to(margin_P.dtype).mean(),
            "equal_rewards": equal_rewards(groups.reward_PK),
        }
        return Loss(value, metrics, _advantages(beta, margin_P.detach(), best_P1, worst_P1, groups.reward_PK))


def _advantages(beta: float, margin_P: Tensor, best_P1: Tensor, worst_P1: Tensor, reward_PK: Tensor) -> Tensor:
    weight_P1 = beta * torch.sigmoid(-margin_P)[:, None]
    advantage_PK = torch.zeros_like(reward_PK, dtype=weight_P1.dtype)
    return advantage_PK.scatter_add(1, best_P1, weight_P1).scatter_add(1, worst_P1, -weight_P1)
