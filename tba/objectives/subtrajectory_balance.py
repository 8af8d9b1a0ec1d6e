"""Sub-trajectory balance (arXiv:2209.12782): trajectory balance on all parts of a response, with a value model.

V_i is the value model's prediction before the i-th token that counts, and V after the last token is the reward r. A
part begins before token i and ends before token j, or at the end of the response. Its residual is

    delta_ij = V_i / beta - V_j / beta + sum over the tokens i to j - 1 of log pi - log pi_ref

The loss is the mean over responses of the weighted mean of the squares. A part of n tokens has the weight decay^n. All
residuals are 0, whichever policy sampled, if pi is the target pi_ref exp(r / beta) / Z, and V is beta log E[exp(r /
beta)], where pi_ref samples the rest of the response. Before the first token, V / beta is log Z.

Path consistency, as in soft Q-learning for text (arXiv:2106.07704), has the same residuals, but only those of parts
that end with the response: `parts` is then `to-end`.

With g_i = V_i / beta - sum over the tokens before i of log pi - log pi_ref, a residual is g_i - g_j. So the weighted
sum over all pairs is a quadratic form in g, and no tensor has an entry for every pair of every response. g can be much
larger than its differences, so it is computed in float64.
"""
# Shapes: P prompts in the batch, K responses per prompt, T tokens of a row with padding, S states of the longest
# response: one before each token that counts, and its end.

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
AT_ONCE = 1024
"""Number of states whose weights to all others are held at once. All weights of a response of 32,000 tokens would take
8 GB."""


@settings
class SubTrajectoryBalance(Objective):
    """The residuals of trajectory balance of all parts of a response, with a value model."""

    name: Literal["subtrajectory-balance"] = "subtrajectory-balance"
    parts: Parts = "all"
    """Parts of a response whose residuals are learned. A part begins before a token, and ends before a later token or
    at the end of the response. `all`: all parts. `to-end`: those that end with the response, as in path consistency."""
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
        mean = mean_square_to_end if self.parts == "to-end" else mean_square
        square_PK = mean(g_PKS, is_state_PKS, self.part_decay)
        precise, dtype = g_PKS.detach(), groups.logp_PKT.dtype
        residual_PK = (precise[:, :, 0] - ends(precise, is_state_PKS).squeeze(2)).to(dtype)
        log_z_P = mean_of_begun(precise[:, :, 0], groups.tokens_PK > 0).to(dtype)
        metrics = {
            "log_z": log_z_P.mean(),
            "residual_abs": residual_PK.abs().mean(),
            "residual_mean": residual_PK.mean(),
            "equal_rewards": equal_rewards(groups.reward_PK),
            **groups.log_ratio_mean,
        }
        return Loss(square_PK.mean().to(dtype), metrics, -beta * residual_PK, residual_PK, log_z_P)


def states(groups: Groups, *, beta: float) -> tuple[Tensor, Tensor]:
    """Return g and which entries are states, both [P, K, S]. State i is before the i-th token that counts, and the last
    state of a response is its end. Tokens that do not count are skipped as if they did not exist. S is the number of
    states of the longest response. Entries after the end of a response are 0 and no states."""
    mask_PKT, value_PKT = groups.mask_PKT, groups.needed("value_PKT").to(torch.float64)
    log_ratio_PKT = (groups.logp_PKT - groups.needed("ref_logp_PKT")).to(torch.float64) * mask_PKT
    before_PKT = log_ratio_PKT.cumsum(dim=2) - log_ratio_PKT
    tokens, longest = mask_PKT.shape[2], int(groups.tokens_PK.max())
    place_PKT = torch.where(mask_PKT, mask_PKT.cumsum(dim=2) - 1, tokens + 1)  # what does not count goes to the end
    g_PKS = torch.zeros_like(value_PKT[:, :, :1]).expand(-1, -1, tokens + 2)
    g_PKS = g_PKS.scatter(2, place_PKT, value_PKT / beta - before_PKT)
    end_PK1 = (groups.reward_PK.to(torch.float64) / beta - log_ratio_PKT.sum(dim=2))[:, :, None]
    g_PKS = g_PKS.scatter(2, groups.tokens_PK[:, :, None], end_PK1)[:, :, : longest + 1]
    is_state_PKS = torch.arange(longest + 1, device=mask_PKT.device) <= groups.tokens_PK[:, :, None]
    return torch.where(is_state_PKS, g_PKS, 0), is_state_PKS


def ends(g_PKS: Tensor, is_state_PKS: Tensor) -> Tensor:
    """Return [P, K, 1]: g at the end of each response."""
    return g_PKS.gather(2, is_state_PKS.sum(dim=2, keepdim=True) - 1)


def mean_of_begun(first_PK: Tensor, has_tokens_PK: Tensor) -> Tensor:
    """Return [P]: the mean of log Z over the responses that have tokens, or of all if none has. Without a token there
    is no prediction before the first one."""
    counts_PK = (has_tokens_PK | ~has_tokens_PK.any(dim=1, keepdim=True)).to(first_PK.dtype)
    return (first_PK * counts_PK).sum(dim=1) / counts_PK.sum(dim=1)


def mean_square(g_PKS: Tensor, is_state_PKS: Tensor, decay: float) -> Tensor:
    """Return [P, K]: the mean of (g_i - g_j)^2 over all pairs of states of a response, with the weights of their parts.

    The weighted sum over all ordered pairs is 2 sum over i of g_i pull_i, with pull_i = sum over j of w_ij (g_i - g_j),
    and its gradient with respect to g_i is 4 pull_i. g is taken around its mean, because differences are much smaller
    than g.
    """
    present_PKS = is_state_PKS.to(g_PKS.dtype)
    mean_PK1 = (g_PKS.detach() * present_PKS).sum(2, keepdim=True) / present_PKS.sum(2, keepdim=True)
    around_PKS = (g_PKS - mean_PK1) * present_PKS
    weight_PKS, weighted_PKS = (weighted_sums(it, decay) for it in (present_PKS, around_PKS.detach()))
    pull_PKS = weight_PKS * around_PKS.detach() - weighted_PKS
    pairs_PK = (weight_PKS * present_PKS).sum(dim=2)
    half_PK = 2 * (pull_PKS * around_PKS).sum(dim=2)
    return (2 * half_PK - half_PK.detach()) / pairs_PK.clamp(min=torch.finfo(g_PKS.dtype).tiny)


def weighted_sums(value_PKS: Tensor, decay: float) -> Tensor:
    """Return, for each state, the weighted sum of the values of all other states. The weights are made for `AT_ONCE`
    states at a time."""
    place_S = torch.arange(value_PKS.shape[2], dtype=value_PKS.dtype, device=value_PKS.device)
    return torch.cat(
        [value_PKS @ weights((place_S[:, None] - part).abs_(), decay) for part in place_S.split(AT_ONCE)], dim=2
    )


def weights(tokens: Tensor, decay: float) -> Tensor:
    """Return the weights of parts with these numbers of tokens, relative to parts of one token."""
    return torch.where(tokens > 0, decay ** (tokens - 1), 0)


def mean_square_to_end(g_PKS: Tensor, is_state_PKS: Tensor, decay: float) -> Tensor:
    """Return [P, K]: the mean of (g_i - g_end)^2 over all states of a response before its end, with the weights
    of their parts."""
    place_S = torch.arange(g_PKS.shape[2], dtype=g_PKS.dtype, device=g_PKS.device)
    weight_PKS = weights((is_state_PKS.sum(dim=2, keepdim=True) - 1 - place_S).clamp(min=0), decay)
    square_PKS = (g_PKS - ends(g_PKS, is_state_PKS)).square()
    return (weight_PKS * square_PKS).sum(dim=2) / weight_PKS.sum(dim=2).clamp(min=torch.finfo(g_PKS.dtype).tiny)
