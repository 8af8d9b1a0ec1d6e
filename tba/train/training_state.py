"""The state that a trainer needs to continue exactly where it stopped, as a folder of safetensors and JSON.

The folder has the policy in full precision, the optimizer's moments, a reference that has moved, a model that is
trained together with the policy, the random state, the step, and the prompt queues of the replay buffer. Nothing is
pickled: optimizers are flattened into named tensors.

With several ranks, each rank stores the rows of the optimizers' moments that it holds, in a file of its own. Any number
of ranks can read these files: each rank reads the rows that it will hold. A tensor with a single number is the same at
all ranks. Weights are stored whole, by rank 0. If there are several copies of the weights, the ranks of the first copy
store everything.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tba.config import OptimizerName
from tba.distributed.ranks import ALONE, Ranks, held, held_as, rows_of
from tba.errors import Damaged
from tba.models.saving.weight_files import Stored, write_tensors
from tba.runtime.host_copies import HostCopies, size_of
from tba.train.optimizers import HeldAdamW

_STATE, _FILE, _OPTIMIZER, _REFERENCE = "state.json", "optimizer", "optimizer.", "reference.safetensors"
_AUXILIARY, _MOMENTS, _RANDOM = "companion.safetensors", "companion.", "random"


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """Everything in a checkpoint except the policy's weights."""

    step: int
    sync: int
    queues: dict[str, Any]
    optimizer: dict[str, Tensor]  # `index.name` -> tensor, index as in the optimizer's own state
    random: Tensor  # torch's CPU generator
    optimizer_name: OptimizerName = "adamw"
    reference: dict[str, Tensor] | None = None  # the reference's weights by name, if it has moved
    auxiliary: dict[str, Tensor] | None = None  # `name.weights.*` and `name.optimizer.*` of the second model, if any
    ranks: Ranks = ALONE  # the rank that has this state
    others: Callable[[], Sequence[Mapping[str, Any]]] = list  # waits for the files that other ranks store

    def save(self, folder: Path) -> dict[str, str]:
        """Write the state into a folder. Return the sha256 of the files that this process has written, by name, except
        that of a small file."""
        sha256s = {optimizer_file(self.ranks): self.save_optimizer(folder)}
        parts = self._parts_of_auxiliary()
        for tensors, name in ((self.reference, _REFERENCE), (self.auxiliary and parts[0], _AUXILIARY)):
            if tensors is not None:
                sha256s[name] = _write(folder / name, tensors)
        plain = {"step": self.step, "sync": self.sync, "queues": self.queues, "moments": len(self.optimizer)}
        plain["optimizer"] = self.optimizer_name
        (folder / _STATE).write_text(json.dumps(plain))
        return sha256s

    def save_optimizer(self, folder: Path) -> str:
        """Write this rank's part of the optimizer, and return the sha256 of the file."""
        tensors = {f"{_OPTIMIZER}{name}": value for name, value in self.optimizer.items()}
        tensors |= {f"{_MOMENTS}{name}": value for name, value in self._parts_of_auxiliary()[1].items()}
        return _write(folder / optimizer_file(self.ranks), {**tensors, _RANDOM: self.random})

    def _parts_of_auxiliary(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the tensors of the second model that have a file of their own, and those in the file of the optimizer.
        With several ranks, the latter are the moments, of which each rank holds a part."""
        tensors, spread = self.auxiliary or {}, self.ranks.parts > 1
        moments = {name: it for name, it in tensors.items() if spread and name.split(".")[1] == "optimizer"}
        return {name: it for name, it in tensors.items() if name not in moments}, moments

    @classmethod
    def load(cls, folder: Path, ranks: Ranks = ALONE) -> "TrainingState":
        """Read the state in a folder. Raise Damaged if the state is missing or unreadable. Fields that a later version
        of this program has added are ignored."""
        try:
            plain = json.loads((folder / _STATE).read_text())
            tensors, weights = read_optimizer(folder, ranks), _read_rows(folder / _AUXILIARY, ranks)
            state = cls(
                **{name: plain[name] for name in ("step", "sync", "queues")},
                optimizer=_named_after(_OPTIMIZER, tensors),
                random=tensors[_RANDOM],
                optimizer_name=plain.get("optimizer", "adamw"),
                ranks=ranks,
                reference=_read_rows(folder / _REFERENCE, ranks),
                auxiliary=None if weights is None else weights | _named_after(_MOMENTS, tensors),
            )
            _check_moments(tensors.keys(), plain.get("moments", min(state.step, 1)), state.step)
            return state
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise Damaged(f"checkpoint {folder} is not readable: {type(error).__name__}: {error}") from error


def check_saved(folder: Path, *, sync: int, step: int) -> None:
    """Raise Damaged, naming the file, unless a trainer can resume from this folder after this sync and step. Every JSON
    file must be readable, every safetensors file must have its full length, and the state must name this sync and step.
    The values of weights are not read."""
    for path in sorted(folder.rglob("*.json")):
        with _named(path.name):
            json.loads(path.read_bytes())
    for path in sorted(folder.rglob("*.safetensors")):
        with _named(path.name), safe_open(path, "pt") as file:
            file.keys()
    with _named(_STATE):
        plain = json.loads((folder / _STATE).read_bytes())
        if (plain["sync"], plain["step"]) != (sync, step):
            raise ValueError(f"it is of sync {plain['sync']} and step {plain['step']}, not {sync} and {step}")
        if not isinstance(plain["queues"], dict):
            raise ValueError("queues is not a JSON object")
        moments = plain.get("moments", min(step, 1))
    with _named(_FILE), _opened(folder) as files:
        _check_moments(files[0].keys(), moments, step)


@contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        why = f"{type(error).__name__}: {error}"
        raise Damaged(f"{name} is as it was saved, but no trainer can resume from it: {why}") from error


def _check_moments(names: Collection[str], moments: int, step: int) -> None:
    """Raise KeyError unless the random state and all saved tensors of the optimizer are there."""
    found = sum(name.startswith(_OPTIMIZER) for name in names)
    if _RANDOM not in names or found < moments:  # `moments` is 0 if every step was skipped
        raise KeyError(
            f"{found} of {moments} tensors {_OPTIMIZER}* and {_RANDOM if _RANDOM in names else 'no ' + _RANDOM} after "
            f"{step} steps"
        )


def _write(path: Path, tensors: Mapping[str, Tensor]) -> str:
    return write_tensors(path, {name: Stored(it, it.dtype) for name, it in tensors.items()}, {})[0]


def _named_after(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): it for name, it in tensors.items() if name.startswith(prefix)}


def _read_rows(path: Path, ranks: Ranks) -> dict[str, Tensor] | None:
    """Return the rows that a rank holds of the tensors in a file; None if there is no such file."""
    if not path.exists():
        return None
    with safe_open(path, "pt") as file:
        return {key: _rows([file], key, ranks) for key in file.keys()}  # noqa: SIM118


def optimizer_file(ranks: Ranks) -> str:
    return f"{_FILE}.safetensors" if ranks.parts == 1 else f"{_FILE}-{ranks.part:05}-of-{ranks.parts:05}.safetensors"


def read_optimizer(folder: Path, ranks: Ranks) -> dict[str, Tensor]:
    """Return the part of the stored optimizer that a rank holds, whatever the number of ranks that stored it. The rows
    of a tensor continue from file to file. A tensor with a single number is the same in all files."""
    with _opened(folder) as files:
        return {key: _rows(files, key, ranks) for key in files[0].keys()}  # noqa: SIM118


@contextmanager
def _opened(folder: Path) -> Iterator[list[Any]]:
    """Open the files of the optimizer, in the order of ranks. Raise KeyError if any of them is missing."""
    names = sorted(path.name for path in folder.glob(f"{_FILE}*.safetensors"))
    sizes = {int(match[1]) if (match := re.search(r"-of-(\d+)\.", name)) else 1 for name in names}
    if sizes != {len(names)}:
        raise KeyError(f"some parts of {_FILE} are missing: there are {', '.join(names) or 'none'}")
    with ExitStack() as opened:
        yield [opened.enter_context(safe_open(folder / name, "pt")) for name in names]


def _rows(files: Sequence[Any], key: str, ranks: Ranks) -> Tensor:
    slices = [file.get_slice(key) for file in files]
    shapes = [it.get_shape() for it in slices]
    if not shapes[0] or key == _RANDOM:
        return files[0].get_tensor(key)
    wanted, first, parts = rows_of(ranks.part, ranks.parts, sum(shape[0] for shape in shapes)), 0, list[Tensor]()
    for it, (rows, *_) in zip(slices, shapes, strict=True):
        start, stop = max(wanted.start - first, 0), min(wanted.stop - first, rows)
        if start < stop or not parts:
            parts.append(it[start : max(start, stop)])
        first += rows
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return a copy of the optimizer's state. Further training does not change the copy. With several ranks, it is the
    part of the state that this rank holds."""
    state = optimizer.state_dict()["state"]
    tensors = {f"{i}.{name}": held(value) for i, part in state.items() for name, value in part.items()}
    copies = HostCopies(size_of(list(tensors.values())))
    copied = {name: copies.copy(it) for name, it in tensors.items()}
    copies.finish()
    return copied


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    parameters = [it for group in optimizer.param_groups for it in group["params"]]
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = value
    if isinstance(optimizer, HeldAdamW):
        optimizer.restore(state)
        return
    for i, values in state.items():
        values |= {name: held_as(parameters[i], value) for name, value in values.items()}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
