"""Attention of a whole packed row in one call of a GPU's kernel, without padding and without masks.

The kernel is `varlen_attn` of torch, which is FlashAttention. It takes sequences one after the other, each with its own
queries and its own keys. Of Q queries and K keys, query i sees the keys up to number i + K - Q: the last query sees all
keys. So a prompt is a sequence of its own, and a response is a sequence whose queries are its tokens and whose keys are
the tokens of its prompt and then its own. Several heads of queries may share a head of keys.
"""
# Shapes: N tokens of the row, S sequences, K keys of all sequences, H heads of queries, G heads of keys, D size of a
# head.

import math
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # an older torch
    varlen_attn = None

Span = tuple[range, range]
"""Positions in a row: those of the tokens before a sequence, and those of the sequence itself. A token of the sequence
sees all tokens before the sequence, and the tokens of the sequence up to itself."""

DEVICES = {"cuda"}
DTYPES = {torch.bfloat16, torch.float16}


class Sequences(NamedTuple):
    """The sequences of a row, as the kernel takes them. Their queries are the tokens of the row in order."""

    keys_K: Tensor
    """Position in the row of each key, sequence after sequence."""
    queries_before_S1: Tensor
    """Number of queries before each sequence, and at last of all queries. The kernel wants int32."""
    keys_before_S1: Tensor
    """The same of keys."""
    most_queries: int
    """Number of queries of the sequence that has most."""
    most_keys: int
    """Number of keys of the sequence that has most."""


def sequences_of(spans: Sequence[Span], device: torch.device) -> Sequences:
    """Return the sequences of a row. The spans are in the order of the row and leave no token out."""
    queries = [len(own) for _, own in spans]
    keys = [len(before) + len(own) for before, own in spans]
    places = [place for before, own in spans for place in (*before, *own)]
    return Sequences(
        torch.tensor(places, device=device),
        torch.tensor([0, *accumulate(queries)], dtype=torch.int32, device=device),
        torch.tensor([0, *accumulate(keys)], dtype=torch.int32, device=device),
        max(queries),
        max(keys),
    )


def around(window: int | None, most_keys: int) -> tuple[int, int]:
    """Return how many keys before and after its own a query sees, as the kernel takes it; -1 means all. `window`
    includes the query's own key, and None means all keys."""
    return (-1, 0) if window is None or window >= most_keys else (window - 1, 0)


def attend_at_once(
    query_NHD: Tensor, key_NGD: Tensor, value_NGD: Tensor, sequences: Sequences, window: int | None, scaling: float
) -> Tensor:
    """Return [N, H, D]: attention of all sequences of a row. `why_not` must have allowed it."""
    key_KGD, value_KGD = (
        cast(Tensor, _Selected.apply(it.to(value_NGD.dtype), sequences.keys_K)) for it in (key_NGD, value_NGD)
    )
    seen_NHD = cast(Any, varlen_attn)(
        query_NHD.to(value_NGD.dtype),
        key_KGD,
        value_KGD,
        sequences.queries_before_S1,
        sequences.keys_before_S1,
        sequences.most_queries,
        sequences.most_keys,
        scale=scaling,
        window_size=around(window, sequences.most_keys),
        enable_gqa=True,
    )
    return cast(Tensor, seen_NHD)


class _Selected(torch.autograd.Function):
    """Selects keys or values. A prompt is selected once for each of its responses, so its gradient is a sum, which is
    computed in float32."""

    @staticmethod
    def forward(ctx: Any, held_NGD: Tensor, keys_K: Tensor) -> Tensor:
        ctx.save_for_backward(keys_K)
        ctx.tokens = len(held_NGD)
        return held_NGD.index_select(0, keys_K)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        (grad_KGD,), (keys_K,) = grad_outputs, ctx.saved_tensors
        precise = torch.promote_types(grad_KGD.dtype, torch.float32)
        total_NGD = grad_KGD.new_zeros(ctx.tokens, *grad_KGD.shape[1:], dtype=precise)
        return total_NGD.index_add_(0, keys_K, grad_KGD.to(precise)).to(grad_KGD.dtype), None


# --- Can the kernel be used? ------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """The properties of tensors on which it depends whether the kernel can be used."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    key_heads: int
    size: int
    value_size: int
    has_window: bool


def kind_of(query_NHD: Tensor, key_NGD: Tensor, value_NGD: Tensor, window: int | None) -> Kind:
    (_, heads, size), (_, key_heads, value_size) = query_NHD.shape, value_NGD.shape
    return Kind(value_NGD.device, value_NGD.dtype, heads, key_heads, size, value_size, window is not None)


@cache
def why_not(kind: Kind) -> str:
    """Return why the kernel cannot be used for such tensors. Return an empty string if it can. To find out, the kernel
    is tried on a short row, and its values and gradients are compared with the formula."""
    if kind.device.type not in DEVICES:
        return f"the kernel is not for a device of type {kind.device.type}"
    if kind.dtype not in DTYPES:
        return f"the kernel does not compute in {kind.dtype}".replace("torch.", "")
    if varlen_attn is None:
        return f"torch {torch.__version__} does not have the kernel"
    if kind.value_size != kind.size:
        return f"keys have {kind.size} numbers in a head and values {kind.value_size}: the kernel wants equally many"
    try:
        away = _away(kind)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        return f"the kernel refuses: {str(error).strip().partition(chr(10))[0]}"
    return "" if away < 0.05 else f"the kernel is wrong by a share of {away:.2g} on a short row"


_TRIED: Sequence[Span] = [(range(0), range(5)), (range(5), range(5, 12)), (range(5), range(12, 13))]
"""A prompt with two responses."""


def _away(kind: Kind) -> float:
    """Return the largest distance of the kernel's values or gradients from those of the formula, as a share of their
    norm. All are rounded to the type that the kernel computes in, by less than a hundredth."""
    random = torch.Generator().manual_seed(0)
    heads = (kind.heads, kind.key_heads, kind.key_heads, kind.heads)
    given = [torch.randn(13, it, kind.size, generator=random).to(kind.device, kind.dtype) for it in heads]
    window, scaling = (4 if kind.has_window else None), kind.size**-0.5
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(kind.device.type, enabled=False):
        query, key, value, weights = (it.clone().requires_grad_() for it in given)
        found = attend_at_once(query, key, value, sequences_of(_TRIED, kind.device), window, scaling)
        found = [found, *torch.autograd.grad(found, (query, key, value), weights)]
        query, key, value, weights = (it.float() for it in (query, key, value, weights))
        exact = formula(query, key, value, _TRIED, window, scaling)
        exact = [exact, *torch.autograd.grad(exact, (query, key, value), weights)]
    pairs = zip(found, exact, strict=True)
    shares = [float(((ours.float() - theirs).norm() / theirs.norm()).detach()) for ours, theirs in pairs]
    return max(shares) if all(map(math.isfinite, shares)) else math.inf


def formula(
    query_NHD: Tensor, key_NGD: Tensor, value_NGD: Tensor, spans: Sequence[Span], window: int | None, scaling: float
) -> Tensor:
    """Return [N, H, D]: what `attend_at_once` computes, by a matrix of weights for each sequence."""
    repeats, out = query_NHD.shape[1] // key_NGD.shape[1], list[Tensor]()
    for before, own in spans:
        seen = [*before, *own]
        query, key, value = (
            it.transpose(0, 1) for it in (query_NHD[list(own)], *(it[seen] for it in (key_NGD, value_NGD)))
        )
        score_HQK = scaling * query @ key.repeat_interleave(repeats, dim=0).transpose(1, 2)
        away_QK = torch.arange(len(before), len(seen))[:, None] - torch.arange(len(seen))
        sees_QK = (away_QK >= 0) & (away_QK < (window or len(seen)))
        weight_HQK = score_HQK.masked_fill(~sees_QK.to(score_HQK.device), -torch.inf).softmax(dim=2)
        out.append((weight_HQK @ value.repeat_interleave(repeats, dim=0)).transpose(0, 1))
    return torch.cat(out)
