"""Copies a model's tensors to main memory. From a GPU they go into pinned memory, which the GPU writes at the speed of
its bus and without the processor; the copies of all tensors are under way at the same time."""

from collections.abc import Sequence

import torch
from torch import Tensor

ROOM_BYTES = 2**30
"""Size of a block of pinned memory, which holds many tensors. torch keeps the blocks of a copy that is no longer needed
for the next copy. It makes blocks of powers of two, so tensors of their own blocks could waste half of the memory."""
_ALIGNED = 64  # bytes, so that each tensor begins at a multiple of its element's size


class HostCopies:
    """Makes copies of the tensors of one model. `nbytes` is the size of all of them. A copy may be read only after
    `finish`."""

    def __init__(self, nbytes: int):
        self.left = nbytes  # bytes that are still to come
        self._room: Tensor | None = None
        self._used = 0
        self._devices: set[torch.device] = set()

    def copy(self, tensor: Tensor) -> Tensor:
        """Begin to copy a tensor, and return the copy."""
        source = tensor.detach()
        if source.device.type != "cuda":
            return source.to("cpu", copy=True)
        self._devices.add(source.device)
        return self.place_for(source).copy_(source, non_blocking=True)

    def finish(self) -> None:
        """Wait until all copies are complete."""
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()

    def place_for(self, tensor: Tensor) -> Tensor:
        """Return pinned memory with the shape and type of a tensor. It has a storage of its own, as transformers takes
        tensors that share a storage for tied weights."""
        if self._room is None or self._used + tensor.nbytes > self._room.nbytes:
            self._room, self._used = _pinned(max(tensor.nbytes, min(ROOM_BYTES, self.left))), 0
        start, end = self._used, self._used + tensor.nbytes
        self._used += _aligned(tensor.nbytes)
        self.left -= _aligned(tensor.nbytes)
        return torch.from_numpy(self._room.numpy()[start:end]).view(tensor.dtype).view(tensor.shape)


def size_of(tensors: Sequence[Tensor]) -> int:
    return sum(_aligned(it.nbytes) for it in tensors)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


def _pinned(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
