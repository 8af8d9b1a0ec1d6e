"""A moving reference: a reference that is reset to the policy at regular intervals, or that follows the policy at every
step.

A reference that does not move is the policy before training. Searchers have stored its log-probabilities, and these
suffice. A moving reference lives in the trainer, which computes its log-probabilities anew, and in checkpoints.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from tba.distributed.ranks import at_rest, held_as, whole
from tba.models.adapters import trainable
from tba.train.micro_batches import MicroBatch, Piece, read


class MovingReference:
    def __init__(self, twin: nn.Module):
        """`twin` is a copy of the policy's model, with which the reference begins."""
        self.moving = [name for name, _ in trainable(twin)]  # not the base of adapters, which never changes
        self.model = twin.requires_grad_(False)

    @torch.no_grad()
    def follow(self, policy: nn.Module, *, decay: float) -> None:
        """Set each weight to decay x itself + (1 - decay) x the policy's weight. With a decay of 0 the reference
        becomes the policy."""
        at_rest(self.model)
        theirs = dict(policy.named_parameters())
        for name, mine in self._moving():
            mine.lerp_(theirs[name], 1 - decay)

    def refer(self, part: MicroBatch, logps: Callable[[nn.Module, Piece], Tensor]) -> MicroBatch:
        """Replace the stored reference log-probabilities of a micro-batch by those under this reference. `logps`
        computes the log-probabilities of a piece under a model."""
        ref_logp_BT = part.spread(read({"logp": partial(logps, self.model)}, part)["logp"])
        by_token = None if part.batch.ref_logp_BT is None else ref_logp_BT
        batch = replace(part.batch, ref_logp_B=ref_logp_BT.sum(dim=1), ref_logp_BT=by_token)
        return part._replace(batch=batch)

    def tensors(self, *, keep: bool = True) -> dict[str, Tensor]:
        """Return a copy of the weights, which does not change when the reference moves on. All ranks must call this
        together. Ranks with `keep` false get an empty copy."""
        at_rest(self.model)
        weights = ((name, whole(it.detach())) for name, it in self._moving())
        return {name: it.to("cpu", copy=True) for name, it in weights if keep}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the weights to `tensors`. With several ranks, `tensors` has the rows that this rank holds."""
        at_rest(self.model)
        for name, parameter in self._moving():
            parameter.copy_(held_as(parameter, tensors[name]))

    def _moving(self) -> list[tuple[str, nn.Parameter]]:
        parameters = dict(self.model.named_parameters())
        return [(name, parameters[name]) for name in self.moving]
