"""Attention of short sequences: by torch, or by two matrix products where these are faster."""
# Shapes: C sequences, H heads, G heads of keys and values, Q queries and K keys of each sequence, D size of a head.

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

LONGEST_PLAIN = 256
"""Largest number of keys for which two matrix products are used on a CPU in bfloat16. Forward and backward together
took an eighth of the time of torch's attention with 11 queries and 51 keys, half of it with 128 and 256, and the same
with 256 and 512. In float32, torch's attention is about as fast."""


def attention(
    query_CHQD: Tensor, key_CGKD: Tensor, value_CGKD: Tensor, mask_C1QK: Tensor | None, scaling: float
) -> Tensor:
    """Return [C, H, Q, D]. The mask is true where a query sees a key; None is a causal mask. Several heads of queries
    may share a head of keys and values."""
    on_cpu, repeats = value_CGKD.device.type == "cpu", query_CHQD.shape[1] // key_CGKD.shape[1]
    if on_cpu and value_CGKD.dtype == torch.bfloat16 and value_CGKD.shape[2] <= LONGEST_PLAIN:
        key_CHKD, value_CHKD = (_repeated(it, repeats) for it in (key_CGKD, value_CGKD))
        return cast(Tensor, _PlainAttention.apply(query_CHQD, key_CHKD, value_CHKD, mask_C1QK, scaling))
    shares = on_cpu and repeats > 1  # on a GPU, the kernels that take masks or float32 cannot share heads
    key, value = (it if shares else _repeated(it, repeats) for it in (key_CGKD, value_CGKD))
    return nn.functional.scaled_dot_product_attention(
        query_CHQD, key, value, attn_mask=mask_C1QK, is_causal=mask_C1QK is None, scale=scaling, enable_gqa=shares
    )


def _repeated(held_CGKD: Tensor, repeats: int) -> Tensor:
    return held_CGKD if repeats == 1 else held_CGKD.repeat_interleave(repeats, dim=1)


class _PlainAttention(torch.autograd.Function):
    """Computes softmax in float32 and products in the type of the values. For the backward pass it keeps the weights of
    attention in this type."""

    @staticmethod
    def forward(
        ctx: Any, query_CHQD: Tensor, key_CHKD: Tensor, value_CHKD: Tensor, mask_C1QK: Tensor | None, scaling: float
    ) -> Tensor:
        query_CHQD, key_CHKD = query_CHQD.to(value_CHKD.dtype), key_CHKD.to(value_CHKD.dtype)
        score_CHQK = (query_CHQD @ key_CHKD.transpose(2, 3)).float() * scaling
        if mask_C1QK is None:
            mask_C1QK = torch.ones(score_CHQK.shape[2:], dtype=torch.bool, device=score_CHQK.device).tril()
        weight_CHQK = score_CHQK.masked_fill_(~mask_C1QK, -torch.inf).softmax(dim=3).to(value_CHKD.dtype)
        ctx.save_for_backward(query_CHQD, key_CHKD, value_CHKD, weight_CHQK)
        ctx.scaling = scaling
        return weight_CHQK @ value_CHKD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        (grad_CHQD,) = grad_outputs
        query_CHQD, key_CHKD, value_CHKD, weight_CHQK = ctx.saved_tensors
        weighted_CHQK = (grad_CHQD @ value_CHKD.transpose(2, 3)).float() * weight_CHQK
        by_score_CHQK = weighted_CHQK - weighted_CHQK.sum(dim=3, keepdim=True) * weight_CHQK
        by_score_CHQK = by_score_CHQK.mul_(ctx.scaling).to(value_CHKD.dtype)
        by_value_CHKD = weight_CHQK.transpose(2, 3) @ grad_CHQD
        return by_score_CHQK @ key_CHKD, by_score_CHQK.transpose(2, 3) @ query_CHQD, by_value_CHKD, None, None
