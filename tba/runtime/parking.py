"""Move the tensors of models and optimizers from a GPU to main memory for a while, and back."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from tba.runtime.host_copies import HostCopies, size_of

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

    def park(self) -> None:
        """Move all tensors to main memory, and drop gradients."""
        places = [place for owner in self.owners() for place in _places(owner) if is_away(place[0])]
        copies, moved = HostCopies(size_of([tensor for tensor, _ in places])), dict[tuple[object, ...], Tensor]()
        for tensor, put in places:
            memory = tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()
            if memory not in moved:
                moved[memory] = copies.copy(tensor)
            put(moved[memory])
            self.parked.append(Parked(moved[memory], put, tensor.device))
        copies.finish()

    def unpark(self) -> None:
        """Move the tensors back to where they were."""
        parked, self.parked = self.parked, []
        moved = dict[int, Tensor]()
        for tensor, put, home in parked:
            if id(tensor) not in moved:
                moved[id(tensor)] = tensor.to(home, non_blocking=True)
            put(moved[id(tensor)])
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the memory that is read must not be freed before


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
