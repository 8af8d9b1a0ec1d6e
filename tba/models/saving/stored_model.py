"""Splits a model for saving: into its weights, under the names and in the layout of the model's files, and into a model
without weights, whose other files transformers writes."""

import copy
from threading import Lock
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from tba.models.saving.weight_files import Stored

SAVING = Lock()
"""Held while transformers saves files that are not weights. Its tokenizers and configs are not made for threads."""


def stored_weights(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, Stored]:
    """Return the weights that `save_pretrained` would write, by the names in the files. Floating-point parameters are
    to be stored as `dtype`, and buffers as they are. Nothing is converted yet."""
    kept = {it.data_ptr() for it in model.buffers()}
    state: dict[str, Any] = model.state_dict()
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    state = revert_weight_conversion(model, remove_tied_weights_from_state_dict(state, model))
    return {
        name: Stored(it, dtype if it.is_floating_point() and it.data_ptr() not in kept else it.dtype)
        for name, it in state.items()
    }


def without_weights(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return a copy of a model of which `save_pretrained` can write everything but the weights."""
    memo: dict[int, Any] = {id(it): it for it in model.buffers()}
    for parameter in model.parameters():
        bare = torch.empty_like(parameter, device="meta", dtype=dtype if parameter.is_floating_point() else None)
        memo[id(parameter)] = nn.Parameter(bare, requires_grad=False)
    return copy.deepcopy(model, memo)
