"""How the output layer of a model computes log-probabilities on a GPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tba.batches import logprobs


class Counted(TorchDispatchMode):
    """Counts the operations that run."""

    operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


class OutputLayerAlone(torch.nn.Module):
    """A model whose hidden states are its inputs."""

    def __init__(self, vocabulary: int):
        super().__init__()
        self.head = torch.nn.Linear(64, vocabulary, bias=False)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def forward(self, hidden_1ND: Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(logits=self.head(hidden_1ND))


@pytest.mark.parametrize("vocabulary", [32_000, 152_000])
def test_on_a_gpu_the_output_layer_starts_few_operations(vocabulary: int, monkeypatch: pytest.MonkeyPatch):
    """Each takes a fixed time to start. Meta tensors have only shapes, and every device but a CPU counts as a GPU."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)  # it does not know the device
    rows = 16_384
    with torch.device("meta"):
        model, hidden_1ND = OutputLayerAlone(vocabulary), torch.empty(1, rows, 64, requires_grad=True)
        tokens_N = torch.empty(rows, dtype=torch.long)
    places = (torch.zeros_like(tokens_N), tokens_N)
    with Counted() as counted:
        logp_N = logprobs.logps_at(model, places, tokens_N, temperature=0.7, hidden_1ND=hidden_1ND)
        logp_N.sum().backward()
    assert model.head.weight.grad is not None and 0 < counted.operations <= 2000
