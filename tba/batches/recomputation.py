"""Layers that keep only what they were given, and compute the rest again in the backward pass.

That of transformers asks for a model in training mode, with its dropout. Here only calls in the forward pass are led
another way: a model, its names and its copies stay as they are, and evaluation mode too.
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
    """ConfigError if transformers says of no layer that it can be computed again."""
    found = [it for it in model.modules() if isinstance(it, GradientCheckpointingLayer)]
    if not found:
        raise ConfigError(f"training.checkpoint_activations: a {type(model).__name__} has no layers that allow it")
    return found


_again: ContextVar[Around] = ContextVar("again", default=nullcontext)


@contextmanager
def again_in(around: Around) -> Iterator[None]:
    """Layers that are called in here are computed again within what `around` makes, each time anew."""
    token = _again.set(around)
    try:
        yield
    finally:
        _again.reset(token)


@contextmanager
def keeping_little(model: nn.Module) -> Iterator[None]:
    """For a forward pass. A layer that has a `forward` of its own, beside its class's, gets it back."""
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


def _checkpointed(forward: Callable[..., Any], *given: Any, **options: Any) -> Any:
    again = _again.get()
    return checkpoint(
        forward,
        *given,
        use_reentrant=False,
        preserve_rng_state=False,  # nothing is drawn
        context_fn=lambda: (nullcontext(), again()),
        **options,
    )
