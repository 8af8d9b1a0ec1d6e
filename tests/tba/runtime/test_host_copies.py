"""Copies of tensors in main memory: equal to the tensors, and independent of them and of each other."""

import pytest
import torch
from transformers.modeling_utils import id_tensor_storage

from tba.runtime import host_copies
from tba.runtime.host_copies import HostCopies, size_of
from tests.support.devices import CUDA


def tensors() -> list[torch.Tensor]:
    plain = [torch.randn(3, 5), torch.tensor(2.0), torch.randn(7).bfloat16(), torch.arange(5), torch.zeros(0, 2)]
    return [*plain, torch.randn(4, 6).t(), torch.randn(300)]


def test_packed_copies_fill_the_blocks_that_were_planned_for_them(monkeypatch: pytest.MonkeyPatch):
    """The tests that need no GPU look at the places alone: only copies from a GPU use them."""
    blocks: list[int] = []

    def block(nbytes: int) -> torch.Tensor:
        blocks.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(host_copies, "_pinned", block)
    monkeypatch.setattr(host_copies, "ROOM_BYTES", 512)
    sources = tensors()
    copies = HostCopies(size_of(sources))
    places = [copies.place_for(it).copy_(it) for it in sources]
    assert all(torch.equal(place, it) and place.dtype == it.dtype for place, it in zip(places, sources, strict=True))
    assert all(place.is_contiguous() for place in places)
    assert len({id_tensor_storage(it) for it in places if it.numel()}) == len(sources) - 1  # no two look tied
    assert blocks == [512, 1200]  # the last tensor is larger than a block
    places[0].zero_()
    assert torch.equal(places[1], sources[1])


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_copy_does_not_change_with_its_source(device: str):
    sources = [it.to(device) for it in tensors()]
    expected = [it.cpu().clone() for it in sources]
    copies = HostCopies(size_of(sources))
    copied = [copies.copy(it) for it in sources]
    copies.finish()
    for source in sources:
        source.zero_()
    assert all(torch.equal(a, b) and a.device.type == "cpu" for a, b in zip(copied, expected, strict=True))
    assert device == "cpu" or all(it.is_pinned() for it in copied if it.numel())
