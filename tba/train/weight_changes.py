"""How much of the weights changes from one published version to the next."""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

_ELEMENTS = 2**20  # compared at a time, so that memory does not grow with the tensors
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


def changed_share(before: Path, after: Path) -> float:
    """Of the weights in two folders of one model, as they are stored, those whose bits are not the same."""
    changed = total = 0
    for path in sorted(after.glob("*.safetensors")):
        with safe_open(before / path.name, "pt") as old, safe_open(path, "pt") as new:
            for name in new.offset_keys():
                a, b = _bits(old.get_tensor(name)), _bits(new.get_tensor(name))
                total += len(b)
                changed += sum(
                    int(torch.count_nonzero(x != y))
                    for x, y in zip(a.split(_ELEMENTS), b.split(_ELEMENTS), strict=True)
                )
    return changed / total


def _bits(weights: Tensor) -> Tensor:
    return weights.reshape(-1).view(_BITS[weights.element_size()])
