"""Choose the next token of a response. A random number is computed from the seed and the token's position alone; this
number and the logits determine the token."""
# Shapes: B rows, V vocabulary.

import numpy as np
import torch
from torch import Tensor


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return, for each pair of seed and position, the number in (0, 1) that decides which token is chosen at this
    position. The number is computed by two rounds of splitmix64."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    mixed = _mix(_mix(seeds.astype(np.uint64)) + (positions.astype(np.uint64) + np.uint64(1)) * golden)
    return ((mixed >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53


def _mix(bits: np.ndarray) -> np.ndarray:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def choose(logits_BV: Tensor, uniforms_B: Tensor, *, temperature: float, top_p: float) -> Tensor:
    """Return [B] tokens. The probabilities of the tokens are added up in the order of the vocabulary; the token of a
    row is the first at which this sum exceeds the row's uniform number. At temperature 0 it is the most likely token
    instead. `top_p` restricts the choice to the smallest set of most likely tokens whose probabilities add up to at
    least `top_p`."""
    if temperature == 0:
        return logits_BV.argmax(dim=1)
    rows = max(1, 2**20 // logits_BV.shape[1])  # limits the memory of a large vocabulary in float64
    return torch.cat(
        [
            _invert(torch.softmax(logits.double() / temperature, dim=1), uniform, top_p)
            for logits, uniform in zip(logits_BV.split(rows), uniforms_B.split(rows), strict=True)
        ]
    )


def _invert(probability_BV: Tensor, uniforms_B: Tensor, top_p: float) -> Tensor:
    if top_p < 1:
        sorted_BV, order_BV = probability_BV.sort(dim=1, descending=True, stable=True)
        sorted_BV[sorted_BV.cumsum(dim=1) - sorted_BV >= top_p] = 0
        probability_BV = torch.zeros_like(probability_BV).scatter(1, order_BV, sorted_BV)
    cumulative_BV = probability_BV.cumsum(dim=1)
    token_B1 = torch.searchsorted(cumulative_BV, uniforms_B[:, None] * cumulative_BV[:, -1:], right=True)
    return token_B1.squeeze(1).clamp(max=probability_BV.shape[1] - 1)
