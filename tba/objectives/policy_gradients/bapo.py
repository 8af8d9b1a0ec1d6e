"""BAPO (arXiv:2510.18927): GRPO whose bounds of the ratio are chosen anew for each batch, so that tokens with positive
advantages contribute enough to the loss.

    L = - mean over tokens of min(rho A, clip(rho, low, high) A),    A = (r - mean of r) / (std of r + 1e-4)

The contribution of a token is the absolute value of this minimum. The bounds start at 0.6 and 1.2. As long as the
tokens with positive advantages contribute less than `positive_contribution` of the sum over all tokens, `high` rises by
0.05 up to 3, and then `low` by 0.02 up to 0.9. This is the paper's algorithm 1, with its constants. A token with a
clipped minimum has no gradient; the loss of `token_choice.py` leaves such tokens out.

The paper's equation 8 weighs each token by its probability under mu. As mu has sampled the tokens, this is the
expectation that a mean over them estimates without weights, as the authors' code does. Their code compares the
contributions with each other, not with their sum: its target t is `positive_contribution` = t / (1 + t). It also
raises `low` first, and bounds the ratio at 3 where the advantage is negative; here both are as in the paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from tba.objectives.groups import LARGEST
from tba.objectives.policy_gradients.token_choice import TokenChoice
from tba.runtime.lazy_torch import torch
from tba.settings import settings

if TYPE_CHECKING:
    from torch import Tensor

LOWER = [round(0.6 + 0.02 * n, 2) for n in range(16)]  # up to 0.9
UPPER = [round(1.2 + 0.05 * n, 2) for n in range(37)]  # up to 3
BOUNDS = [*((LOWER[0], high) for high in UPPER), *((low, UPPER[-1]) for low in LOWER[1:])]
"""The pairs of bounds in the order in which they are tried."""


@settings
class BAPO(TokenChoice):
    """Balanced policy optimisation with adaptive clipping."""

    name: Literal["bapo"] = "bapo"
    positive_contribution: Annotated[float, Field(gt=0, lt=1)] = 0.4
    """Share that tokens with positive advantages must contribute to the loss. Higher values let the ratios of good
    responses rise further above 1 before they are clipped, and clip bad responses earlier."""

    def stays(
        self, log_ratio_PKT: Tensor, advantage_PK: Tensor, mask_PKT: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        ratio_PKT = log_ratio_PKT.double().clamp(-LARGEST, LARGEST).exp()
        advantage_PKT = advantage_PK.double()[:, :, None].expand_as(ratio_PKT)
        low, high = balancing_bounds(ratio_PKT[mask_PKT], advantage_PKT[mask_PKT], self.positive_contribution)
        stays_PKT = torch.where(advantage_PKT > 0, ratio_PKT <= high, ratio_PKT >= low) & mask_PKT
        return stays_PKT, {"ratio_low": ratio_PKT.new_tensor(low), "ratio_high": ratio_PKT.new_tensor(high)}


def balancing_bounds(ratio_N: Tensor, advantage_N: Tensor, share: float) -> tuple[float, float]:
    """Return the first pair of `BOUNDS` with which tokens with positive advantages contribute at least `share`, or the
    last pair if there is none."""
    is_good_N, is_bad_N = advantage_N > 0, advantage_N < 0

    def balances(low: float, high: float) -> bool:
        good = (ratio_N[is_good_N].clamp(max=high) * advantage_N[is_good_N]).sum()
        bad = -(ratio_N[is_bad_N].clamp(min=low) * advantage_N[is_bad_N]).sum()
        return bool(good >= share * (good + bad))

    return next((bounds for bounds in BOUNDS if balances(*bounds)), BOUNDS[-1])
