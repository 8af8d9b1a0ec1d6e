"""The geometric mean of the ratios of a response's tokens. In contrast to their product, it does not shrink with the
length of the response."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tba.objectives.weights.ratio import ratio

if TYPE_CHECKING:
    from torch import Tensor


def mean_ratio(log_ratio_PK: Tensor, tokens_PK: Tensor, cap: float) -> Tensor:
    return ratio(log_ratio_PK / tokens_PK.clamp(min=1), tokens_PK, cap)
