"""1 for the responses that stay, and 0 for the others. Of each group, the responses with the largest squared log-ratio
are left out until the mean of the squares is at most the cap. M2PO (arXiv:2510.01161) does so with the tokens of a
batch."""
# Shapes: P prompts in the batch, K responses per prompt.

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def second_moment(log_ratio_PK: Tensor, tokens_PK: Tensor, cap: float) -> Tensor:
    """Return the weights. Equal squares are treated alike. The response with the smallest square always stays."""
    square_PK = log_ratio_PK.square()
    within_PKK = square_PK[:, None, :] <= square_PK[:, :, None]  # of each response: those that are at most as far
    mean_PK = (within_PKK * square_PK[:, None, :]).sum(dim=2) / within_PKK.sum(dim=2)
    stays_PK = (mean_PK <= cap) | (square_PK == square_PK.amin(dim=1, keepdim=True))
    return stays_PK.to(log_ratio_PK.dtype)
