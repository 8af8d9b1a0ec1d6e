"""Supervised fine-tuning: raise the log-probability of demonstrated responses."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tba.batches.batching import pad
from tba.batches.logprobs import token_logps


class Demonstration(NamedTuple):
    prompt: tuple[int, ...]
    response: tuple[int, ...]  # with the EOS token last


def fine_tune(
    model: nn.Module,
    batches: Iterable[Sequence[Demonstration]],
    *,
    steps: int,
    learning_rate: float,
    warmup_steps: int = 0,
    clip_norm: float = 1.0,
    pad_id: int = 0,
) -> Iterator[float]:
    """Yield the loss after each gradient step, so that the caller can look at the model, report, and stop early.

    The loss is the mean cross-entropy of all response tokens of a batch. The learning rate is the smaller of two
    straight lines: a warmup over `warmup_steps`, and a decay to 0 after `steps`. The same model, batches and number of
    threads give the same weights.
    """
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.0)
    for step, batch in zip(range(1, steps + 1), batches, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(step / max(1, warmup_steps), 1 - (step - 1) / steps)
        loss = cross_entropy(model, batch, pad_id=pad_id)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        yield loss.item()


def cross_entropy(model: nn.Module, batch: Sequence[Demonstration], *, pad_id: int = 0) -> Tensor:
    """Return the mean cross-entropy of the response tokens of a batch, a scalar."""
    logps_BT, response_mask_BT = _logps(model, batch, pad_id)
    return -logps_BT.sum() / response_mask_BT.sum()


@torch.inference_mode()
def probabilities(model: nn.Module, batch: Sequence[Demonstration], *, pad_id: int = 0) -> Tensor:
    """Return the exact [B] probabilities with which each whole response would be sampled at temperature 1."""
    return _logps(model, batch, pad_id)[0].sum(dim=1).exp()


def _logps(model: nn.Module, batch: Sequence[Demonstration], pad_id: int) -> tuple[Tensor, Tensor]:
    device = next(model.parameters()).device
    prompts, responses = zip(*batch, strict=True)
    padded = pad(prompts, responses, pad_id=pad_id, device=device)
    return token_logps(model, padded.tokens_BT, padded.response_mask_BT, temperature=1.0), padded.response_mask_BT
