"""The objectives of Kimi k1.5 and OAPL, which fit the log-ratio of each response to its reward by least squares.

    delta = log Z + log(pi / anchor) - r / beta,      L = mean of (beta delta)^2

    Kimi k1.5   log Z = mean of r / beta over the group, anchor = reference                       arXiv:2501.12599
    OAPL        log Z = log mean of exp(r / value_beta) x value_beta / beta, anchor = policy that sampled the response

Trajectory balance has the same residual with log Z = mean of (r / beta - log(pi / ref)). Kimi's log Z leaves out the
mean log-ratio. Its residuals are therefore not 0 at the target, unless the mean log-ratio is 0 there, and the reference
must be reset often. OAPL estimates log Z from responses that the anchor sampled, for which the estimate is consistent.
"""
# Shapes: P prompts in the batch, K responses per prompt.

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from tba.objectives.groups import Anchor, Groups, Loss, equal_rewards
from tba.objectives.objective import Objective
from tba.runtime.lazy_torch import torch
from tba.settings import settings

if TYPE_CHECKING:
    from torch import Tensor


@settings
class Kimi(Objective):
    """The regression of Kimi k1.5."""

    name: Literal["kimi"] = "kimi"
    anchor: Anchor = "reference"
    """Policy that the log-ratio is taken against: the reference, or the behaviour policy that sampled each response."""

    @property
    def needs_reference(self) -> bool:
        return self.moves_reference or self.anchor == "reference"

    @property
    def needs_tokens(self) -> bool:
        return self.anchor == "behaviour"

    def loss(self, groups: Groups, *, beta: float) -> Loss:
        return _regression(groups, groups.reward_PK.mean(dim=1) / beta, beta, self.anchor)


@settings
class OAPL(Objective):
    """The regression of OAPL, with log Z estimated from responses of the behaviour policy."""

    name: Literal["oapl"] = "oapl"
    anchor: Anchor = "behaviour"
    value_beta: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    """Temperature of the soft mean of a group's rewards that estimates log Z. Higher values bring it closer to the
    plain mean, lower values closer to the best reward. 0 uses beta."""

    @property
    def needs_reference(self) -> bool:
        return self.moves_reference or self.anchor == "reference"

    @property
    def needs_tokens(self) -> bool:
        return self.anchor == "behaviour"

    def loss(self, groups: Groups, *, beta: float) -> Loss:
        value_beta = self.value_beta or beta
        log_mean_P = torch.logsumexp(groups.reward_PK / value_beta, dim=1) - math.log(groups.reward_PK.shape[1])
        return _regression(groups, value_beta / beta * log_mean_P, beta, self.anchor)


def _regression(groups: Groups, log_z_P: Tensor, beta: float, anchor: Anchor) -> Loss:
    log_ratio_PK = groups.logp_PK - groups.anchor_logp_PK(anchor)
    residual_PK = log_z_P[:, None] + log_ratio_PK - groups.reward_PK / beta
    detached_PK = residual_PK.detach()
    metrics = {
        "log_z": log_z_P.mean(),
        **groups.log_ratio_mean,
        "residual_abs": detached_PK.abs().mean(),
        "equal_rewards": equal_rewards(groups.reward_PK),
    }
    return Loss((beta * residual_PK).square().mean(), metrics, -beta * detached_PK, detached_PK, log_z_P)
