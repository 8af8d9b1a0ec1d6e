"""M2PO (arXiv:2510.01161): a policy gradient for old data, which leaves out the tokens whose ratio is furthest from 1.

    L = - mean over tokens of keep rho A,      A = (r - mean of r) / (std of r + 1e-4),      rho = pi / mu

The tokens with the largest (log rho)^2 are left out one after the other, until the mean of (log rho)^2 over the others
is at most `second_moment`. Tokens with equal squares are treated alike. The mean is over the tokens of the whole batch,
so the batch is read once more, without gradients, before the loss is computed. Tokens that are left out count in the
divisor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from tba.objectives.groups import LARGEST, Estimates, Groups, Loss, equal_rewards
from tba.objectives.objective import Objective
from tba.objectives.policy_gradients.grpo import standardised
from tba.runtime.lazy_torch import torch
from tba.settings import settings

if TYPE_CHECKING:
    from torch import Tensor


@settings
class M2PO(Objective):
    """A policy gradient with a bound on the second moment of log-ratios."""

    name: Literal["m2po"] = "m2po"
    second_moment: Annotated[float, Field(gt=0, le=100)] = 0.04
    """Largest mean of the squared log-ratios of tokens. Lower values leave out more tokens of old data."""

    @property
    def needs_whole_batch(self) -> bool:
        return True

    @property
    def needs_tokens(self) -> bool:
        return True

    @property
    def needs_reference(self) -> bool:
        return self.moves_reference

    def estimates(self, groups: Groups, *, beta: float) -> Estimates:
        """Return the advantage of each token: that of its response, or 0 if the token is left out."""
        keep_PKT = within_second_moment(_log_ratio(groups).detach(), groups.mask_PKT, self.second_moment)
        kept = keep_PKT.sum() / groups.mask_PKT.sum().clamp(min=1)
        return Estimates(standardised(groups.reward_PK)[:, :, None] * keep_PKT, None, {"ratio_cut": 1 - kept})

    def loss(self, groups: Groups, *, beta: float) -> Loss:
        advantage_PKT, tokens_PK = groups.needed("advantage_PKT"), groups.tokens_PK.clamp(min=1)
        ratio_PKT = _log_ratio(groups).clamp(-LARGEST, LARGEST).exp() * groups.mask_PKT
        gain_PK = (ratio_PKT * advantage_PKT).sum(dim=2)
        metrics = {
            **groups.log_ratio_mean,
            "equal_rewards": equal_rewards(groups.reward_PK),
            "ratio_mean": (ratio_PKT.detach().sum(dim=2) / tokens_PK).mean(),
        }
        return Loss(-gain_PK.mean() / groups.mean_tokens, metrics, advantage_PKT.sum(dim=2) / tokens_PK)


def _log_ratio(groups: Groups) -> Tensor:
    return groups.logp_PKT - groups.needed("behaviour_logp_PKT")


def within_second_moment(log_ratio: Tensor, mask: Tensor, most: float) -> Tensor:
    """Return a boolean tensor that is true for the tokens that count and stay: as many as possible, those with the
    smallest squared log-ratios, such that the mean of the squares is at most `most`. Tokens with equal squares stay
    together or are left out together, so the order of the tokens does not matter."""
    square = log_ratio.double().square()
    values_N, counts_N = square[mask].unique(return_counts=True)  # ascending
    means_N = (values_N * counts_N).cumsum(0) / counts_N.cumsum(0)  # ascending too
    stay_N = values_N[means_N <= most]
    return mask & (square <= stay_N[-1]) if len(stay_N) else torch.zeros_like(mask)
