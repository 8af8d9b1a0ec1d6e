"""What a trainer needs to go on exactly where it stopped, as a folder of safetensors and JSON.

The policy in full precision, the optimizer's moments, a reference that has moved, a model that is trained beside the
policy, the random state, the step, and the prompt queues of the replay buffer. No pickle: optimizers are flattened into
named tensors.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tba.errors import Damaged

_STATE, _TENSORS, _OPTIMIZER, _REFERENCE = "state.json", "optimizer.safetensors", "optimizer.", "reference.safetensors"
_COMPANION = "companion.safetensors"


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """Everything beside the policy's weights."""

    step: int
    sync: int
    queues: dict[str, Any]
    optimizer: dict[str, Tensor]  # `index.name` -> tensor, index as in the optimizer's own state
    random: Tensor  # torch's CPU generator
    reference: dict[str, Tensor] | None = None  # its weights by name, where it has moved
    companion: dict[str, Tensor] | None = None  # weights and optimizer of what is trained beside the policy

    def save(self, folder: Path) -> None:
        tensors = {f"{_OPTIMIZER}{name}": value.contiguous() for name, value in self.optimizer.items()}
        save_file({**tensors, "random": self.random}, folder / _TENSORS)
        for found, name in ((self.reference, _REFERENCE), (self.companion, _COMPANION)):
            if found is not None:
                save_file({key: value.contiguous() for key, value in found.items()}, folder / name)
        plain = {"step": self.step, "sync": self.sync, "queues": self.queues}
        (folder / _STATE).write_text(json.dumps(plain))

    @classmethod
    def load(cls, folder: Path) -> "TrainingState":
        """Damaged if the folder does not hold this; what a later version has added to it is left out."""
        try:
            plain = json.loads((folder / _STATE).read_text())
            tensors = load_file(folder / _TENSORS)
            state = cls(
                **{name: plain[name] for name in ("step", "sync", "queues")},
                optimizer={
                    name.removeprefix(_OPTIMIZER): value
                    for name, value in tensors.items()
                    if name.startswith(_OPTIMIZER)
                },
                random=tensors["random"],
                reference=_load(folder / _REFERENCE),
                companion=_load(folder / _COMPANION),
            )
            if state.step and not state.optimizer:
                raise KeyError(f"no {_OPTIMIZER}* after {state.step} steps")
            return state
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise Damaged(f"checkpoint {folder} is not readable: {type(error).__name__}: {error}") from error


def _load(path: Path) -> dict[str, Tensor] | None:
    return load_file(path) if path.exists() else None


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """A copy of the optimizer's state that does not change as training goes on."""
    state = optimizer.state_dict()["state"]
    return {f"{i}.{name}": value.detach().cpu().clone() for i, part in state.items() for name, value in part.items()}


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
