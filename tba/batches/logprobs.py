"""Log-probabilities of responses under a causal language model.

Only the positions that predict a counted token are projected to the vocabulary, and only a bounded number of their
logits is held at once. For this, a hook takes the hidden states that the output layer would get. If the output layer is
not a plain linear layer, or the model changes its logits afterwards, the layer itself gets these positions, and all
their logits are held.
"""
# Shapes: B rows, T tokens of prompt and response with padding, D hidden, N counted tokens of all rows, V vocabulary.

from collections.abc import Iterator
from typing import Any, TypeGuard, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tba.batches.output_pieces import KEPT_BYTES, ON_CPU, ON_GPU, Pieces


def pieces_on(device: torch.device) -> Pieces:
    return ON_CPU if device.type == "cpu" else ON_GPU


def token_logps(
    model: nn.Module,
    tokens_BT: Tensor,
    response_mask_BT: Tensor,
    *,
    temperature: float,
    attention_mask_BT: Tensor | None = None,
) -> Tensor:
    """Return [B, T]: the log-probability of each counted token given the tokens before it, 0 elsewhere.

    The model's distribution is softmax(logits / temperature), in float32 or higher precision. Column 0 has no token
    before it and never counts. Without an attention mask, padding must be on the right, where causality makes it
    harmless; all roles use this form. With a mask, padding can be anywhere, as in rows that a generator padded on the
    left. The place of the padding does not change the results.
    """
    predicts_BT, targets_BT = response_mask_BT[:, 1:], tokens_BT[:, 1:]
    placed: dict[str, Tensor] = {}
    if attention_mask_BT is not None:
        mask_BT = attention_mask_BT[:, :-1].long()
        placed = {"attention_mask": mask_BT, "position_ids": (mask_BT.cumsum(dim=1) - 1).clamp(min=0)}
    targets_N = targets_BT[predicts_BT]
    logp_N = logps_at(model, predicts_BT, targets_N, temperature=temperature, input_ids=tokens_BT[:, :-1], **placed)
    logp_BT = logp_N.new_zeros(predicts_BT.shape).masked_scatter(predicts_BT, logp_N)
    return nn.functional.pad(logp_BT, (1, 0))


def logps_at(
    model: Any, places: Tensor | tuple[Tensor, ...], tokens_N: Tensor, *, temperature: float, **inputs: Tensor
) -> Tensor:
    """Return [N]: log softmax(logits / temperature) of the tokens, in float32 or higher precision. `places`, a mask or
    indices, gives the [B, T] positions at which the model predicts these tokens."""
    head: nn.Module | None = model.get_output_embeddings()
    if model not in _changing and _is_plain(head):
        hidden_ND = _projected_at(model, head, places, **inputs)
        if hidden_ND is not None:
            kept_bytes = KEPT_BYTES if torch.is_grad_enabled() else 0
            return cast(
                Tensor,
                _ProjectedLogps.apply(
                    hidden_ND, head.weight, head.bias, tokens_N, _checked(temperature), kept_bytes, _computed_in(head)
                ),
            )
        _changing.add(model)
    return chosen_logps(_logits_at(model, head, places, **inputs), tokens_N, temperature=temperature)


_changing: WeakSet[nn.Module] = WeakSet()
"""Models that were seen to change the logits that their output layer returns."""


def _is_plain(head: nn.Module | None) -> TypeGuard[nn.Linear]:
    """True if the output layer is a linear layer that nothing has changed."""
    return type(head) is nn.Linear and "forward" not in vars(head) and not head._forward_hooks


def _projected_at(model: Any, head: nn.Linear, places: Tensor | tuple[Tensor, ...], **inputs: Tensor) -> Tensor | None:
    """Return [N, D]: the hidden states that the output layer gets at these places. Return None if the model does not
    return the output of the layer unchanged.

    To save time, the output layer runs on no positions, and a stand-in tensor replaces its output. If the model returns
    another tensor, or has changed the stand-in, the model changes its logits.
    """
    kept: list[Tensor] = []
    returned: list[Tensor] = []

    def keep(_: nn.Module, hidden: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        kept.append(hidden[0][places])
        return (hidden[0][:, :0],)

    def stand_in(_: nn.Module, hidden: object, logits: Tensor) -> Tensor:
        with torch.inference_mode(False):  # tensors of inference mode have no `_version`
            returned.append(torch.empty_like(logits, requires_grad=False))
        return returned[-1]

    hooks = [head.register_forward_pre_hook(keep), head.register_forward_hook(stand_in)]
    try:
        logits = model(use_cache=False, **inputs).logits
    finally:
        for hook in hooks:
            hook.remove()
    untouched = len(returned) == 1 and logits is returned[0] and logits._version == 0
    return kept[0] if untouched else None


def _logits_at(model: Any, head: nn.Module | None, places: Tensor | tuple[Tensor, ...], **inputs: Tensor) -> Tensor:
    """Return [N, V]: the logits at these places, as the model computes them."""
    kept = False

    def keep(_: nn.Module, hidden: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        nonlocal kept
        kept = True
        hidden_BTD, *rest = hidden
        return (hidden_BTD[places].unsqueeze(0), *rest)

    hook = head.register_forward_pre_hook(keep) if head is not None else None
    try:
        logits = model(use_cache=False, **inputs).logits
    finally:
        if hook is not None:
            hook.remove()
    return logits.squeeze(0) if kept else logits[places]  # not kept if the model does not call such a layer


def _computed_in(head: nn.Linear) -> torch.dtype:
    """Return the number format in which the layer computes products. Under autocast, this is less precise than the
    format of the weights."""
    kind = head.weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else head.weight.dtype


class _ProjectedLogps(torch.autograd.Function):
    """Projects, normalises and differentiates a few rows at a time. For the backward pass it keeps at most `kept_bytes`
    of logits, and computes all others again. Products are computed in the type `computed`, forward and backward.
    Autograd converts each gradient to the type of its tensor."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        tokens_N: Tensor,
        temperature: float,
        kept_bytes: int,
        computed: torch.dtype,
    ) -> Tensor:
        ctx.computed = computed
        hidden_ND, weight, bias = hidden_ND.to(computed), weight_VD.to(computed), _as(computed, bias_V)
        logp_N = hidden_ND.new_empty(len(tokens_N), dtype=_precise(hidden_ND.dtype))
        kept: list[Tensor] = []
        most = pieces_on(weight.device).projected
        for hidden, tokens, logp in _in_pieces(most, len(weight_VD), hidden_ND, tokens_N, logp_N):
            logits = nn.functional.linear(hidden, weight, bias)
            write_logps(logp, logits, tokens, temperature)
            kept_bytes -= logits.nbytes
            if kept_bytes >= 0:
                kept.append(logits)
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, tokens_N, *kept)
        ctx.temperature = temperature
        return logp_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        (grad_N,) = grad_outputs
        hidden_ND, weight_VD, bias_V, tokens_N, *kept = ctx.saved_tensors
        weight, bias = weight_VD.to(ctx.computed), _as(ctx.computed, bias_V)
        by_hidden_ND = torch.empty_like(hidden_ND)
        by_weight_VD = _zeros(weight_VD) if ctx.needs_input_grad[1] else None
        by_bias_V = _zeros(bias_V) if ctx.needs_input_grad[2] else None
        still, pieces = iter(kept), pieces_on(weight.device)
        sums = 1 if by_weight_VD is None or by_weight_VD.dtype == ctx.computed else pieces.summed
        for block, of_block, grads, by_block in _in_pieces(
            pieces.projected, len(weight_VD), hidden_ND, tokens_N, grad_N, by_hidden_ND, together=sums
        ):
            by_logits_BV = block.new_empty(len(block), len(weight_VD))
            for hidden, tokens, grad, by_hidden, by_logits in _in_pieces(
                pieces.projected, len(weight_VD), block, of_block, grads, by_block, by_logits_BV
            ):
                logits = next(still, None)
                if logits is None:  # their gradient takes their place
                    logits = _write_logits(by_logits, hidden, weight, bias)
                _write_gradient(by_logits, grad, logits, tokens, ctx.temperature)
                torch.mm(by_logits, weight, out=by_hidden)
            if by_weight_VD is not None:
                _add_product(by_weight_VD, by_logits_BV.T, block)
            if by_bias_V is not None:
                by_bias_V += by_logits_BV.sum(dim=0, dtype=by_bias_V.dtype)
        return by_hidden_ND, by_weight_VD, by_bias_V, None, None, None, None


def _write_logits(to_NV: Tensor, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    if bias_V is None:
        return torch.mm(hidden_ND, weight_VD.T, out=to_NV)
    return torch.addmm(bias_V, hidden_ND, weight_VD.T, out=to_NV)


def _as(dtype: torch.dtype, tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def _zeros(like: Tensor) -> Tensor:
    """Return zeros to which the gradients of rows are added, in float32 or higher precision."""
    return torch.zeros_like(like, dtype=_precise(like.dtype))


def _add_product(to: Tensor, left: Tensor, right: Tensor) -> None:
    if to.dtype == left.dtype:
        to.addmm_(left, right)
    else:
        to += left @ right


def chosen_logps(logits_NV: Tensor, tokens_N: Tensor, *, temperature: float) -> Tensor:
    """Return [N]: log softmax(logits / temperature) of the tokens, in float32 or higher precision."""
    return cast(Tensor, _ChosenLogps.apply(logits_NV, tokens_N, _checked(temperature)))


class _ChosenLogps(torch.autograd.Function):
    """Keeps only the logits for the backward pass. The plain expression would keep several copies of the logits in
    float32."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, tokens_N: Tensor, temperature: float) -> Tensor:
        ctx.save_for_backward(logits_NV, tokens_N)
        ctx.temperature = temperature
        logp_N = logits_NV.new_empty(len(tokens_N), dtype=_precise(logits_NV.dtype))
        write_logps(logp_N, logits_NV, tokens_N, temperature)
        return logp_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore
        (grad_N,) = grad_outputs
        logits_NV, tokens_N = ctx.saved_tensors
        by_logits_NV = torch.empty_like(logits_NV)
        _write_gradient(by_logits_NV, grad_N, logits_NV, tokens_N, ctx.temperature)
        return by_logits_NV, None, None


def write_logps(to_N: Tensor, logits_NV: Tensor, tokens_N: Tensor, temperature: float) -> None:
    """Write log softmax(logits / temperature) of the tokens to `to_N`, computed in the dtype of `to_N`."""
    most = pieces_on(logits_NV.device).normalised
    for to, logits, tokens in _in_pieces(most, logits_NV.shape[1], to_N, logits_NV, tokens_N):
        logps = torch.log_softmax(_scaled(logits.to(to.dtype), temperature), dim=1)
        torch.gather(logps, 1, tokens[:, None], out=to[:, None])


def _write_gradient(to_NV: Tensor, grad_N: Tensor, logits_NV: Tensor, tokens_N: Tensor, temperature: float) -> None:
    """Write the gradient with respect to the logits, computed from the gradient with respect to the
    log-probabilities. `to_NV` may be the logits themselves."""
    most = pieces_on(logits_NV.device).normalised
    rows = _in_pieces(most, logits_NV.shape[1], to_NV, grad_N / temperature, logits_NV, tokens_N)
    for to, grad, logits, tokens in rows:
        by_logits = torch.softmax(_scaled(logits.to(grad.dtype), temperature), dim=1).mul_(-grad[:, None])
        to.copy_(by_logits.scatter_add_(1, tokens[:, None], grad[:, None]))


def _scaled(logits_NV: Tensor, temperature: float) -> Tensor:
    return logits_NV if temperature == 1 else logits_NV / temperature


def _in_pieces(most: int, vocabulary: int, *tensors: Tensor, together: int = 1) -> Iterator[tuple[Tensor, ...]]:
    """Yield pieces of all tensors together, a few rows at a time. A piece has at most `most` logits, or a single row.
    With `together`, this many pieces are one."""
    return zip(*(tensor.split(together * max(1, most // vocabulary)) for tensor in tensors), strict=True)


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _checked(temperature: float) -> float:
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    return temperature
