"""Attention by two matrix products, compared with the formula in double precision."""

import pytest
import torch
from torch import Tensor

from tba.batches.attention import LONGEST_PLAIN, attention


def formula(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
    key, value = (it.repeat_interleave(query.shape[1] // it.shape[1], dim=1) for it in (key, value))
    score = (query @ key.transpose(2, 3)) * scaling
    return score.masked_fill(~mask, -torch.inf).softmax(dim=3) @ value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys", [7, LONGEST_PLAIN, LONGEST_PLAIN + 1])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shared", [2, 1], ids=["two heads of keys", "one head of keys"])
def test_values_and_gradients_are_those_of_the_formula(dtype, keys, causal, shared):
    generator = torch.Generator().manual_seed(keys)
    queries = keys if causal else 5
    shapes = [(3, 2, queries, 8), (3, shared, keys, 8), (3, shared, keys, 8)]
    given = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    sees = None if causal else (torch.rand(3, 1, queries, keys, generator=generator) < 0.5) | (torch.arange(keys) == 0)
    weights = torch.randn(3, 2, queries, 8, generator=generator)

    def found(function, kind: torch.dtype) -> list[Tensor]:
        inputs = [it.detach().to(kind).requires_grad_() for it in given]
        out = function(*inputs, sees, 0.3)
        (out * weights.to(kind)).sum().backward()
        return [out.detach(), *(it.grad for it in inputs if it.grad is not None)]

    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    for ours, exact in zip(found(attention, dtype), found(formula, torch.float64), strict=True):
        assert ours.dtype == dtype
        assert float((ours.double() - exact).norm()) < tolerance * float(exact.norm())
