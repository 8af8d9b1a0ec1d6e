"""A reference that moves: reset to the policy every so many steps, or drawn after it at every step.

A reference that stays is the policy before training, and what searchers stored of it serves. One that moves lives with
the trainer, who computes its log-probabilities anew, and in the trainer's checkpoints.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tba.ranks import at_rest, held_as, whole


class MovingReference:
    def __init__(self, twin: nn.Module):
        """Begins as what is a copy of the policy's model."""
        self.model = twin.requires_grad_(False)

    @torch.no_grad()
    def follow(self, policy: nn.Module, *, decay: float) -> None:
        """decay x itself + (1 - decay) x the policy, weight by weight; at 0 it is the policy."""
        at_rest(self.model)
        for mine, theirs in zip(self.model.parameters(), policy.parameters(), strict=True):
            mine.lerp_(theirs, 1 - decay)

    def tensors(self, *, keep: bool = True) -> dict[str, Tensor]:
        """A copy of its weights that does not change as it moves on; of several ranks one keeps it."""
        at_rest(self.model)
        found = ((name, whole(it.detach())) for name, it in self.model.named_parameters())
        return {name: it.to("cpu", copy=True) for name, it in found if keep}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Of several ranks each has the rows that it holds."""
        at_rest(self.model)
        for name, parameter in self.model.named_parameters():
            parameter.copy_(held_as(parameter, tensors[name]))
