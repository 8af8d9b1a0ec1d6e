"""Marks of tests that always run on the CPU, and also on a GPU if there is one; and a CPU that plays the GPU."""

import pytest
import torch

from tba.runtime import parking
from tba.runtime.host_copies import HostCopies

HAS_GPU = torch.cuda.is_available()
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="there is no GPU here that torch can use")]
CUDA = pytest.param("cuda", marks=needs_gpu)
DEVICES = ["cpu", CUDA]


def treat_cpu_as_gpu(patch: pytest.MonkeyPatch) -> set[int]:
    """Let parking treat the CPU as if it were a GPU. Memory that it leaves is filled with NaN. Return the addresses of
    this memory, to which every parked tensor is added."""
    left = set[int]()

    class Copies(HostCopies):
        def copy(self, tensor: torch.Tensor) -> torch.Tensor:
            left.add(tensor.data_ptr())
            copied = super().copy(tensor)
            if tensor.is_floating_point():
                tensor.detach().fill_(torch.nan)
            return copied

    patch.setattr(parking, "is_away", lambda tensor: True)
    patch.setattr(parking, "HostCopies", Copies)
    return left
