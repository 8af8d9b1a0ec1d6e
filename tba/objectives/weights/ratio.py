"""The probability of a response under the policy, divided by that under the policy that sampled it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tba.objectives.groups import LARGEST

if TYPE_CHECKING:
    from torch import Tensor


def ratio(log_ratio_PK: Tensor, tokens_PK: Tensor, cap: float) -> Tensor:
    return log_ratio_PK.clamp(-LARGEST, LARGEST).exp().clamp(max=cap)
