"""Log-probabilities of responses under a causal language model.

Only the positions that predict a counted token are projected to the vocabulary: a hook before the output layer drops
all others, so no model pays for logits of its prompt, and whatever a model does to logits afterwards still happens.
"""
# Shapes: B rows, T tokens of prompt and response with padding, D hidden, N counted tokens of all rows, V vocabulary.

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def token_logps(
    model: nn.Module,
    tokens_BT: Tensor,
    response_mask_BT: Tensor,
    *,
    temperature: float,
    attention_mask_BT: Tensor | None = None,
) -> Tensor:
    """[B, T] log-probability of each counted token given those before it; 0 elsewhere.

    The model's distribution is softmax(logits / temperature), in float32 at least. Column 0 has nothing before it and
    is never counted. Without an attention mask, padding stands on the right only, where causality makes it harmless
    and attention needs no mask: so do all roles. With one it may stand anywhere, as in rows that a generator padded on
    the left; the numbers are the same.
    """
    predicts_BT, targets_BT = response_mask_BT[:, 1:], tokens_BT[:, 1:]
    placed: dict[str, Tensor] = {}
    if attention_mask_BT is not None:
        mask_BT = attention_mask_BT[:, :-1].long()
        placed = {"attention_mask": mask_BT, "position_ids": (mask_BT.cumsum(dim=1) - 1).clamp(min=0)}
    logits_NV = logits_at(model, predicts_BT, input_ids=tokens_BT[:, :-1], **placed)
    logp_N = chosen_logps(logits_NV, targets_BT[predicts_BT], temperature=temperature)
    logp_BT = logp_N.new_zeros(predicts_BT.shape).masked_scatter(predicts_BT, logp_N)
    return nn.functional.pad(logp_BT, (1, 0))


def chosen_logps(logits_NV: Tensor, tokens_N: Tensor, *, temperature: float) -> Tensor:
    """[N] log softmax(logits / temperature) of the tokens, in float32 at least."""
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    return cast(Tensor, _ChosenLogps.apply(logits_NV, tokens_N, temperature))


class _ChosenLogps(torch.autograd.Function):
    """Over a large vocabulary this is where the memory goes: the plain expression keeps or passes several float32
    copies of the logits. Taken a few rows at a time, in both directions, nothing is kept but the logits themselves, and
    on a CPU the intermediate values stay in its cache, which is several times faster."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, tokens_N: Tensor, temperature: float) -> Tensor:
        ctx.save_for_backward(logits_NV, tokens_N)
        ctx.temperature = temperature
        logp_N = logits_NV.new_empty(len(tokens_N), dtype=_precise(logits_NV.dtype))
        for logits, tokens, logp in _in_pieces(logits_NV, tokens_N, logp_N):
            logps = torch.log_softmax(logits.to(logp.dtype) / temperature, dim=1)
            torch.gather(logps, 1, tokens[:, None], out=logp[:, None])
        return logp_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore
        (grad_N,) = grad_outputs
        logits_NV, tokens_N = ctx.saved_tensors
        grad_NV = torch.empty_like(logits_NV)
        for logits, tokens, grad, out in _in_pieces(logits_NV, tokens_N, grad_N / ctx.temperature, grad_NV):
            by_logit = torch.softmax(logits.to(grad.dtype) / ctx.temperature, dim=1).mul_(-grad[:, None])
            out.copy_(by_logit.scatter_add_(1, tokens[:, None], grad[:, None]))
        return grad_NV, None, None


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _in_pieces(logits_NV: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same few rows of each tensor, about a million logits at a time."""
    rows = max(1, 2**20 // logits_NV.shape[1])
    return zip(*(tensor.split(rows) for tensor in (logits_NV, *others)), strict=True)


def logits_at(model: Any, places: Tensor | tuple[Tensor, ...], **inputs: Tensor) -> Tensor:
    """[N, V] logits at these places of the [B, T] tokens, a mask or indices."""
    kept = False

    def keep(_: nn.Module, hidden: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        nonlocal kept
        kept = True
        hidden_BTD, *rest = hidden
        return (hidden_BTD[places].unsqueeze(0), *rest)

    head: nn.Module | None = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(keep) if head is not None else None
    try:
        logits = model(use_cache=False, **inputs).logits
    finally:
        if hook is not None:
            hook.remove()
    return logits.squeeze(0) if kept else logits[places]  # a model without such a layer, or one that does not call it
