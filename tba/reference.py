"""A reference that moves: reset to the policy every so many steps, or drawn after it at every step.

A reference that stays is the policy before training, and what searchers stored of it serves. One that moves lives with
the trainer, who computes its log-probabilities anew, and in the trainer's checkpoints.
"""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn


class MovingReference:
    """A copy of the policy's model, on the same device."""

    def __init__(self, policy: nn.Module):
        self.model = copy.deepcopy(policy).requires_grad_(False)

    @torch.no_grad()
    def follow(self, policy: nn.Module, *, decay: float) -> None:
        """decay x itself + (1 - decay) x the policy, weight by weight; at 0 it is the policy."""
        for mine, theirs in zip(self.model.parameters(), policy.parameters(), strict=True):
            mine.lerp_(theirs, 1 - decay)

    def tensors(self) -> dict[str, Tensor]:
        """A copy of its weights that does not change as it moves on."""
        return {name: it.detach().to("cpu", copy=True) for name, it in self.model.named_parameters()}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.copy_(tensors[name])
