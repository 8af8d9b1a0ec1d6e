"""How the output layer of a model computes log-probabilities on a GPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tba.batches import logprobs
from tba.batches.output_pieces import ON_CPU, ON_GPU, Pieces


class Counted(TorchDispatchMode):
    """Counts the operations that run, and keeps the shapes of the factors of each product."""

    def __init__(self):
        super().__init__()
        self.operations = 0
        self.products = list[tuple[torch.Size, torch.Size]]()
        self.added = list[torch.dtype]()
        """Number formats of tensors to which something as large as the weights is added."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        name = func.overloadpacket.__name__
        if name == "mm":  # with or without `out`
            self.products.append((args[0].shape, args[1].shape))
        if name in ("add_", "addmm_") and args[0].dim() == 2:
            self.added.append(args[0].dtype)
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


ROWS = 16_384


def counted(vocabulary: int, monkeypatch: pytest.MonkeyPatch, *, lowered: bool) -> Counted:
    """Return what a forward and a backward pass run on a GPU. Meta tensors have only shapes, and every device but a CPU
    counts as a GPU. If `lowered`, weights are float32 and products bfloat16."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: lowered)  # it does not know the device
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.bfloat16)
    with torch.device("meta"):
        model, hidden_1ND = OutputLayerAlone(vocabulary), torch.empty(1, ROWS, 64, requires_grad=True)
        tokens_N = torch.empty(ROWS, dtype=torch.long)
    places = (torch.zeros_like(tokens_N), tokens_N)
    with Counted() as counted:
        logp_N = logprobs.logps_at(model, places, tokens_N, temperature=0.7, hidden_1ND=hidden_1ND)
        logp_N.sum().backward()
    assert model.head.weight.grad is not None
    return counted


@pytest.mark.parametrize("lowered", [True, False], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("vocabulary", [32_000, 152_000])
def test_on_a_gpu_the_output_layer_starts_few_operations(vocabulary, lowered, monkeypatch):
    """Each takes a fixed time to start. No more than 2,000 may be started for so many rows; there is room below."""
    assert 0 < counted(vocabulary, monkeypatch, lowered=lowered).operations <= 1000


@pytest.mark.parametrize("vocabulary", [32_000, 152_000])
def test_on_a_gpu_a_product_has_more_than_a_thousand_rows(vocabulary, monkeypatch):
    products = counted(vocabulary, monkeypatch, lowered=True).products
    rows = [left[0] for left, right in products if right == (64, vocabulary) and left[0]]
    rests = [it for it in rows if it < 1500]  # the last product of each pass has the rows that are left
    assert sum(rows) >= ROWS and len(rests) <= 2


@pytest.mark.parametrize(("vocabulary", "times"), [(32_000, 1), (152_000, 5)])
def test_on_a_gpu_the_gradient_of_the_weights_is_added_up_a_few_times_in_float32(vocabulary, times, monkeypatch):
    found = counted(vocabulary, monkeypatch, lowered=True)
    assert found.added == [torch.float32] * times
    assert len([left for left, _ in found.products if left[0] == vocabulary]) == times


@pytest.mark.parametrize("pieces", [ON_CPU, ON_GPU])
def test_the_memory_that_is_stated_is_that_of_pieces(pieces: Pieces):
    """Logits of a product in bfloat16, or the gradients of several, and a part of them twice in float32."""
    rows, vocabulary = 10**6, 1024
    projected, normalised = pieces.projected, 8 * pieces.normalised
    assert pieces.rows(vocabulary) * vocabulary == projected
    assert pieces.forward_bytes(rows, vocabulary, number=2) == 2 * projected + normalised
    assert pieces.backward_bytes(rows, vocabulary, number=2) == 2 * pieces.summed * projected + normalised
    assert pieces.backward_bytes(rows, vocabulary, number=4) == 4 * projected + normalised
    assert pieces.backward_bytes(1, vocabulary, number=2) == vocabulary * (2 + 8)
