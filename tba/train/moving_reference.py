"""A reference that moves: reset to the policy every so many steps, or drawn after it at every step.

A reference that stays is the policy before training, and what searchers stored of it serves. One that moves lives with
the trainer, who computes its log-probabilities anew, and in the trainer's checkpoints.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tba.distributed.ranks import at_rest, held_as, whole
from tba.models.adapters import trainable


class MovingReference:
    def __init__(self, twin: nn.Module):
        """Begins as what is a copy of the policy's model."""
        self.moving = [name for name, _ in trainable(twin)]  # beside the base of adapters, which never differs
        self.model = twin.requires_grad_(False)

    @torch.no_grad()
    def follow(self, policy: nn.Module, *, decay: float) -> None:
        """decay x itself + (1 - decay) x the policy, weight by weight; at 0 it is the policy."""
        at_rest(self.model)
        theirs = dict(policy.named_parameters())
        for name, mine in self._moving():
            mine.lerp_(theirs[name], 1 - decay)

    def tensors(self, *, keep: bool = True) -> dict[str, Tensor]:
        """A copy of its weights that does not change as it moves on; of several ranks one keeps it."""
        at_rest(self.model)
        found = ((name, whole(it.detach())) for name, it in self._moving())
        return {name: it.to("cpu", copy=True) for name, it in found if keep}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Of several ranks each has the rows that it holds."""
        at_rest(self.model)
        for name, parameter in self._moving():
            parameter.copy_(held_as(parameter, tensors[name]))

    def _moving(self) -> list[tuple[str, nn.Parameter]]:
        found = dict(self.model.named_parameters())
        return [(name, found[name]) for name in self.moving]
