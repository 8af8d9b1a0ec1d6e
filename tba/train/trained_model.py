"""A model in training: its weights, and the optimizer that updates them."""

from collections.abc import Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from tba.config import TrainingConfig
from tba.distributed.ranks import ALONE, Ranks, at_rest, by_kind, held_as, is_sharded, whole
from tba.models.adapters import trainable
from tba.train.optimizers import make_optimizer
from tba.train.training_state import optimizer_tensors, restore_optimizer
from tba.types import Metrics

Model = TypeVar("Model", bound=nn.Module)


class Trained(Generic[Model]):
    """A model and its optimizer. `learning_rate` is the peak of the schedule. The names of the model's metrics and
    tensors begin with `name`, which is empty for the policy."""

    def __init__(self, model: Model, training: TrainingConfig, *, learning_rate: float, name: str = ""):
        self.model, self.name, self.learning_rate = model, name, learning_rate
        self.clip_norm = training.clip_norm
        self.parameters = [it for _, it in trainable(model)]  # only the adapters, if the policy has adapters
        self.kinds = by_kind(self.parameters)
        self.optimizer = make_optimizer(self.parameters, training, learning_rate=learning_rate)

    @property
    def norm_name(self) -> str:
        return f"{self.name}_grad_norm" if self.name else "grad_norm"

    @property
    def clipped_name(self) -> str:
        return f"{self.name}_clipped" if self.name else "clipped"

    def add_up(self, ranks: Ranks) -> None:
        """Sum the gradients of parameters that every rank holds whole. Those of sharded parameters are summed in the
        backward pass."""
        for parameter in self.parameters:
            if parameter.grad is not None and not is_sharded(parameter):
                ranks.add_up(parameter.grad)

    def grad_norm(self) -> Tensor:
        norms = [whole(get_total_norm([p.grad for p in kind if p.grad is not None])) for kind in self.kinds]
        return norms[0] if len(norms) == 1 else get_total_norm(norms)

    def update(self, norm: Tensor, *, factor: float) -> Metrics:
        """Take a step with the gradients, whose norm is `norm`, at `factor` times the peak learning rate. If the
        settings clip gradients, return a metric: 1 if these gradients were clipped, 0 if not."""
        metrics: Metrics = {}
        if self.clip_norm:
            for kind in self.kinds:
                clip_grads_with_norm_(kind, self.clip_norm, norm)
            metrics = {self.clipped_name: float(norm > self.clip_norm)}
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * factor
        self.optimizer.step()
        return metrics

    def tensors(self, ranks: Ranks = ALONE) -> dict[str, Tensor]:
        """Return a copy of what a rank stores: rank 0 the weights, and each rank its part of the optimizer's state.
        Further training does not change the copy. All ranks must call this together."""
        at_rest(self.model)
        gathered = ((name, whole(it.detach())) for name, it in trainable(self.model))
        weights = {name: it.to("cpu", copy=True) for name, it in gathered if ranks.rank == 0}
        parts = {"weights": weights, "optimizer": optimizer_tensors(self.optimizer) if ranks.stores else {}}
        return {f"{self.name}.{part}.{key}": it for part, tensors in parts.items() for key, it in tensors.items()}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the weights and the optimizer from a copy that `tensors` made. With several ranks, the copy has the
        rows that this rank holds. Do nothing if the copy has no tensors of this model, for example in a fork whose
        parent trained another model together with the policy."""
        prefix = f"{self.name}."
        found = {key.removeprefix(prefix): it for key, it in tensors.items() if key.startswith(prefix)}
        if not found:
            return
        at_rest(self.model)
        for name, parameter in trainable(self.model):
            parameter.copy_(held_as(parameter, found[f"weights.{name}"]))
        moments = {key.removeprefix("optimizer."): it for key, it in found.items() if key.startswith("optimizer.")}
        restore_optimizer(self.optimizer, moments)
