"""Marks of tests that always run on the CPU, and also on a GPU if there is one."""

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="there is no GPU here that torch can use")]
CUDA = pytest.param("cuda", marks=needs_gpu)
DEVICES = ["cpu", CUDA]
