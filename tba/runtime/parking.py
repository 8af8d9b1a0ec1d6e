"""Move the tensors of models and optimizers from a GPU to main memory for a while, and back."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

Owner = nn.Module | Optimizer
Put = Callable[[Tensor], object]


class Parked(NamedTuple):
    tensor: Tensor  # in main memory
    put: Put  # puts another tensor in its place
    home: torch.device


class Parking:
    """Holds the tensors of models and optimizers in main memory; `owners` returns these. Parameters stay the same
    objects, so optimizers still know them. Tensors that share their memory, such as tied weights, still share it.
    Tensors that are in main memory anyway stay where they are."""

    def __init__(self, owners: Callable[[], Iterable[Owner]]):
        self.owners = owners
        self.parked: list[Parked] = []

    @property
    def bytes(self) -> int:
        """Return how much memory the tensors need when they are moved back."""
        return sum(it.nbytes for it in {id(parked.tensor): parked.tensor for parked in self.parked}.values())

    def park(self) -> None:
        """Move all tensors to main memory, and drop gradients."""
        moved = dict[tuple[object, ...], Tensor]()
        for tensor, put in (place for owner in self.owners() for place in list(_places(owner))):
            if not is_away(tensor):
                continue
            # Nothing is allocated on the GPU meanwhile, so no other tensor can have got the memory of a moved one.
            memory = tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()
            if memory not in moved:
                moved[memory] = _in_main_memory(tensor)
            put(moved[memory])
            self.parked.append(Parked(moved[memory], put, tensor.device))
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # until the copies are there

    def unpark(self) -> None:
        """Move the tensors back to where they were."""
        parked, self.parked = self.parked, []
        moved = dict[int, Tensor]()
        for tensor, put, home in parked:
            if id(tensor) not in moved:
                moved[id(tensor)] = tensor.to(home, non_blocking=True)
            put(moved[id(tensor)])


def free_cache() -> None:
    """Give the memory of the GPU that torch keeps for later tensors back to other processes."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def is_away(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


def _places(owner: Owner) -> Iterator[tuple[Tensor, Put]]:
    """Yield each tensor of an owner, with a function that puts another tensor in its place."""
    if isinstance(owner, Optimizer):
        for state in owner.state.values():
            for name, it in state.items():
                if isinstance(it, Tensor):
                    yield it, partial(state.__setitem__, name)
        return
    for parameter in owner.parameters():
        parameter.grad = None
        yield parameter.data, partial(setattr, parameter, "data")
    for module in owner.modules():
        for name, it in module._buffers.items():
            if it is not None:
                yield it, partial(module._buffers.__setitem__, name)


def _in_main_memory(tensor: Tensor) -> Tensor:
    """Return a copy in main memory. It is pinned where there is a GPU, which then copies several times as fast."""
    copy = torch.empty_like(tensor, device="cpu", pin_memory=torch.cuda.is_available())
    return copy.copy_(tensor.detach(), non_blocking=True)
