"""M2PO (arXiv:2510.01161): a policy gradient for old data, which leaves out the tokens whose ratio is furthest from 1.

The tokens with the largest (log rho)^2 are left out one after the other, until the mean of (log rho)^2 over the others
is at most `second_moment`. Tokens with equal squares are treated alike. The loss is that of
`tba/objectives/policy_gradients/token_choice.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from tba.objectives.policy_gradients.token_choice import TokenChoice
from tba.runtime.lazy_torch import torch
from tba.settings import settings

if TYPE_CHECKING:
    from torch import Tensor


@settings
class M2PO(TokenChoice):
    """A policy gradient with a bound on the second moment of log-ratios."""

    name: Literal["m2po"] = "m2po"
    second_moment: Annotated[float, Field(gt=0, le=100)] = 0.04
    """Largest mean of the squared log-ratios of tokens. Lower values leave out more tokens of old data."""

    def stays(
        self, log_ratio_PKT: Tensor, advantage_PK: Tensor, mask_PKT: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        return within_second_moment(log_ratio_PKT, mask_PKT, self.second_moment), {}


def within_second_moment(log_ratio: Tensor, mask: Tensor, most: float) -> Tensor:
    """Return a boolean tensor that is true for the tokens that count and stay: as many as possible, those with the
    smallest squared log-ratios, such that the mean of the squares is at most `most`. Tokens with equal squares stay
    together or are left out together, so the order of the tokens does not matter."""
    square = log_ratio.double().square()
    values_N, counts_N = square[mask].unique(return_counts=True)  # ascending
    means_N = (values_N * counts_N).cumsum(0) / counts_N.cumsum(0)  # ascending too
    stay_N = values_N[means_N <= most]
    return mask & (square <= stay_N[-1]) if len(stay_N) else torch.zeros_like(mask)
