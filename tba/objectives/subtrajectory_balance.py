"""Sub-trajectory balance (arXiv:2209.12782): trajectory balance on all parts of a response, with a value model.

V_i is the value model's prediction before the i-th token that counts, and V after the last token is the reward r. Each
part, from before token i to before token j, has the residual

    delta_ij = V_i / beta - V_j / beta + sum over the tokens i to j - 1 of log pi - log pi_ref

The loss is the mean over responses of the weighted mean of the squares. A part of n tokens has the weight decay^n. All
residuals are 0, whichever policy sampled, if pi is the target pi_ref exp(r / beta) / Z, and V is beta log E[exp(r /
beta)], where pi_ref samples the rest of the response. Before the first token, V / beta is log Z.

The same residuals are those of path consistency (soft Q-learning, arXiv:1702.08892, for text arXiv:2106.07704), which
takes only the parts that end with the response: `parts` is then `to-end`.

With g_i = V_i / beta - sum over the tokens before i of log pi - log pi_ref, a residual is g_i - g_j. So the weighted
sum over all pairs is a quadratic form in g, and no tensor has an entry for every pair and response.
"""
# Shapes: P prompts in the batch, K responses per prompt, T tokens of a row with padding, S = T + 1 states.

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from tba.objectives.groups import Groups, Loss, equal_rewards
from tba.objectives.objective import Auxiliary, Objective
from tba.runtime.lazy_torch import torch
from tba.settings import settings

if TYPE_CHECKING:
    from torch import Tensor

Parts = Literal["all", "to-end"]


@settings
class SubTrajectoryBalance(Objective):
    """The residuals of trajectory balance of all parts of a response, with a value model."""

    name: Literal["subtrajectory-balance"] = "subtrajectory-balance"
    parts: Parts = "all"
    """Parts of a response whose residuals are learned. `all`: from every token to every later one. `to-end`: from every
    token to the end, as in path consistency."""
    part_decay: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Weight of a part relative to one that is a token shorter. 1 weighs all parts alike; lower values learn more from
    short parts, and so rely more on the value model."""
    value_learning_rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Peak learning rate of the value model, on the schedule of the policy. 0 uses `training.learning_rate`."""

    @property
    def needs_tokens(self) -> bool:
        return True

    @property
    def has_residuals(self) -> bool:
        return True

    @property
    def auxiliary(self) -> Auxiliary:
        return Auxiliary("value", self.value_learning_rate)

    def loss(self, groups: Groups, *, beta: float) -> Loss:
        g_PKS, is_state_PKS = states(groups, beta=beta)
        weight_SS = part_weights(g_PKS.shape[2], self.part_decay, g_PKS)
        if self.parts == "to-end":
            square_PK = mean_square_to_end(g_PKS, is_state_PKS, weight_SS)
        else:
            square_PK = mean_square(g_PKS, is_state_PKS, weight_SS)
        log_z_PK = g_PKS[:, :, 0].detach()
        residual_PK = log_z_PK - last(g_PKS, groups).detach()
        metrics = {
            "log_z": log_z_PK.mean(),
            "residual_abs": residual_PK.abs().mean(),
            "residual_mean": residual_PK.mean(),
            "equal_rewards": equal_rewards(groups.reward_PK),
            **groups.log_ratio_mean,
        }
        value = square_PK.mean().to(groups.logp_PKT.dtype)
        return Loss(value, metrics, -beta * residual_PK, residual_PK, log_z_PK.mean(dim=1))


def states(groups: Groups, *, beta: float) -> tuple[Tensor, Tensor]:
    """Return g and which entries are states, both [P, K, S]. State i is before the i-th token that counts, and the last
    state of a response is its end. Tokens that do not count are skipped as if they did not exist. Further entries are
    0 and no states."""
    mask_PKT, value_PKT = groups.mask_PKT, groups.needed("value_PKT")
    log_ratio_PKT = (groups.logp_PKT - groups.needed("ref_logp_PKT")) * mask_PKT
    before_PKT = log_ratio_PKT.cumsum(dim=2) - log_ratio_PKT
    tokens = mask_PKT.shape[2]
    place_PKT = torch.where(mask_PKT, mask_PKT.cumsum(dim=2) - 1, tokens + 1)  # what does not count goes to the end
    g_PKS = torch.zeros_like(value_PKT[:, :, :1]).expand(-1, -1, tokens + 2)
    g_PKS = g_PKS.scatter(2, place_PKT, value_PKT / beta - before_PKT)
    end_PK1 = (groups.reward_PK / beta - log_ratio_PKT.sum(dim=2))[:, :, None].to(g_PKS.dtype)
    g_PKS = g_PKS.scatter(2, groups.tokens_PK[:, :, None], end_PK1)[:, :, :-1]
    is_state_PKS = torch.arange(tokens + 1, device=mask_PKT.device) <= groups.tokens_PK[:, :, None]
    return torch.where(is_state_PKS, g_PKS, 0), is_state_PKS


def last(g_PKS: Tensor, groups: Groups) -> Tensor:
    """Return [P, K]: g at the end of each response."""
    return g_PKS.gather(2, groups.tokens_PK[:, :, None]).squeeze(2)


def part_weights(count: int, decay: float, like: Tensor) -> Tensor:
    """Return [S, S]: decay to the power of the number of tokens between two states, and 0 between a state and
    itself."""
    place_S = torch.arange(count, device=like.device)
    length_SS = (place_S[:, None] - place_S).abs()
    return torch.where(length_SS > 0, decay ** length_SS.to(torch.float64), 0.0)


def mean_square(g_PKS: Tensor, is_state_PKS: Tensor, weight_SS: Tensor) -> Tensor:
    """Return [P, K]: the weighted mean of (g_i - g_j)^2 over all pairs of states of a response. It is computed in
    float64 and around the mean, because differences are much smaller than g."""
    present_PKS = is_state_PKS.to(torch.float64)
    exact_PKS = g_PKS.to(torch.float64)
    mean_PK1 = (exact_PKS.detach() * present_PKS).sum(2, keepdim=True) / present_PKS.sum(2, keepdim=True)
    exact_PKS = (exact_PKS - mean_PK1) * present_PKS
    total_PKS = present_PKS @ weight_SS
    pairs_PK = (total_PKS * present_PKS).sum(dim=2)
    squares_PK = 2 * ((total_PKS * exact_PKS.square()).sum(dim=2) - ((exact_PKS @ weight_SS) * exact_PKS).sum(dim=2))
    return squares_PK / pairs_PK.clamp(min=torch.finfo(torch.float64).tiny)


def mean_square_to_end(g_PKS: Tensor, is_state_PKS: Tensor, weight_SS: Tensor) -> Tensor:
    """Return [P, K]: the weighted mean of (g_i - g_end)^2 over all states of a response before its end."""
    ends_PK1 = is_state_PKS.sum(dim=2, keepdim=True) - 1
    weight_PKS = weight_SS[ends_PK1.squeeze(2)] * is_state_PKS
    exact_PKS = g_PKS.to(torch.float64)
    square_PKS = (exact_PKS - exact_PKS.gather(2, ends_PK1)).square()
    return (weight_PKS * square_PKS).sum(dim=2) / weight_PKS.sum(dim=2).clamp(min=torch.finfo(torch.float64).tiny)
