"""Read the folder of a version: its weights, and a digest of its config and tokenizer files."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from tba.models.adapters import CONFIG

_DESCRIPTION = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", CONFIG)


@dataclass(frozen=True)
class VersionFolder:
    """A version whose files are open. The weights are memory-mapped: they use no memory of their own, and they stay
    readable after the folder is removed."""

    path: Path
    description: bytes
    weights: dict[str, Tensor]

    @staticmethod
    def read(path: Path) -> "VersionFolder":
        files = sorted(path.glob("*.safetensors"))
        return VersionFolder(path, describe(path), {name: w for file in files for name, w in load_file(file).items()})


def describe(folder: Path) -> bytes:
    """Return a digest of a folder's files that describe the model: configs and tokenizer, but not the weights. Two
    folders with equal digests differ only in their weights."""
    digest = hashlib.sha256()
    for name in _DESCRIPTION:
        path = folder / name
        digest.update(path.read_bytes() if path.exists() else b"")
        digest.update(b"\0")
    return digest.digest()


def is_gone(folder: Path) -> bool:
    """Return whether some or all files of a version have been removed. The config of the model or adapter is always the
    first file to be removed."""
    return not any((folder / name).exists() for name in ("config.json", CONFIG))


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights in a folder, by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.offset_keys()}
    if not shapes:
        raise FileNotFoundError(f"no weights in {folder}")
    return shapes


def copy_weights(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> bool:
    """Copy weights into a model. Return False, and copy nothing, if their names or shapes are not those of the
    model."""
    tied, held = set(getattr(model, "all_tied_weights_keys", None) or ()), model.state_dict()
    if set(held) - tied != set(weights) - tied or any(held[name].shape != weights[name].shape for name in weights):
        return False
    for name, tensor in weights.items():
        held[name].copy_(tensor)
    return True
