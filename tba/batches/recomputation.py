"""Activation checkpointing: layers keep only their inputs, and compute the rest again in the backward pass.

The checkpointing of transformers needs a model in training mode, with dropout. Here the layers' `forward` is replaced,
and only during a forward pass. The model, its names, its copies and its evaluation mode stay as they are.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from tba.errors import ConfigError

Around = Callable[[], AbstractContextManager[None]]


def layers_of(model: nn.Module) -> Sequence[nn.Module]:
    """Return the layers that can be computed again, as transformers marks them. Raise ConfigError if there is none."""
    layers = [it for it in model.modules() if isinstance(it, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"training.checkpoint_activations must be false for a {type(model).__name__}, which has no layers that "
            "allow it, got true"
        )
    return layers


_again: ContextVar[Around] = ContextVar("again", default=nullcontext)


@contextmanager
def again_in(around: Around) -> Iterator[None]:
    """If a layer that runs in the `with` block is computed again, even after the block, this happens in a new context
    that `around` makes."""
    token = _again.set(around)
    try:
        yield
    finally:
        _again.reset(token)


@contextmanager
def keeping_little(model: nn.Module) -> Iterator[None]:
    """In the `with` block, a forward pass keeps only the inputs of layers. After the block, each layer has its former
    `forward` back."""
    layers = layers_of(model) if torch.is_grad_enabled() else []
    own = [vars(layer).get("forward") for layer in layers]
    try:
        for layer in layers:
            layer.forward = partial(_checkpointed, layer.forward)
        yield
    finally:
        for layer, forward in zip(layers, own, strict=True):
            vars(layer).pop("forward", None)
            if forward is not None:
                layer.forward = forward


def _checkpointed(forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    again = _again.get()
    return checkpoint(
        forward,
        *inputs,
        use_reentrant=False,
        preserve_rng_state=False,  # layers draw no random numbers
        context_fn=lambda: (nullcontext(), again()),
        **options,
    )
