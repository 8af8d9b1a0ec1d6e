"""Tensors leave a GPU completely and come back, and nobody who knows them notices."""

from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.harness.tiny_models import tiny_policy
from tba.runtime.parking import Parking
from tba.train.learner import Learner
from tests.support.devices import treat_cpu_as_gpu
from tests.support.tba.trainers import settings


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inside, self.head = nn.Embedding(11, 4), nn.Linear(4, 4), nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((), 0.5))
        self.register_buffer("same_scale", self.scale)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.inside(self.embedding(tokens)) * self.scale))


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    tokens = torch.arange(11, device=next(model.parameters()).device)
    optimizer.zero_grad(set_to_none=True)
    nn.functional.cross_entropy(model(tokens), tokens).backward()
    optimizer.step()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [it for state in optimizer.state.values() for it in state.values()]
    return [*(it.detach() for it in model.parameters()), *model.buffers(), *states]


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Treat the CPU as if it were a GPU. Memory that was left is filled with NaN. Return the addresses of this
    memory."""
    return treat_cpu_as_gpu(monkeypatch)


def places(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[int]:
    return {it.data_ptr() for it in everything(model, optimizer)}


def test_nothing_is_left_where_it_was(emptied: set[int]):
    model = Tied()
    optimizer, parking = torch.optim.AdamW(model.parameters()), Parking(lambda: [model, optimizer])
    take_step(model, optimizer)
    before = places(model, optimizer)
    parking.park()
    assert emptied == before
    assert all(it.grad is None for it in model.parameters())


def test_what_is_in_main_memory_stays_where_it_is():
    model = Tied()
    optimizer, parking = torch.optim.AdamW(model.parameters()), Parking(lambda: [model, optimizer])
    take_step(model, optimizer)
    before = places(model, optimizer)
    parking.park()
    assert places(model, optimizer) == before
    parking.unpark()


def trained(steps: int, *, parks: bool, **options: Any) -> Tied:
    torch.manual_seed(0)
    model = Tied()
    optimizer, parking = torch.optim.AdamW(model.parameters(), lr=0.1, **options), Parking(lambda: [model, optimizer])
    for _ in range(steps):
        take_step(model, optimizer)
        if parks:
            parking.park()
            parking.unpark()
    return model


def test_training_goes_on_as_if_nothing_had_been_moved(emptied: set[int]):
    model, plain = trained(3, parks=True), trained(3, parks=False)
    for name, it in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], it), name


def test_tied_weights_stay_tied(emptied: set[int]):
    model = trained(2, parks=True)
    assert model.head.weight is model.embedding.weight
    assert model.get_buffer("same_scale") is model.get_buffer("scale")


def test_owners_that_share_a_tensor_share_it_afterwards(emptied: set[int]):
    one, other, parking = nn.Linear(3, 3), nn.Linear(3, 3), Parking(lambda: [one, other])
    other.weight = nn.Parameter(one.weight.detach())  # another parameter with the same memory
    parking.park()
    parking.unpark()
    one.weight.detach().fill_(7.0)
    assert bool((other.weight == 7.0).all())


def test_a_learner_leaves_nothing_on_its_gpu(emptied: set[int]):
    """Neither policy, value model, reference, nor the moments of both optimizers."""
    learner = Learner(settings(objective__name="ppo", objective__reference_decay=0.9), tiny_policy())
    for step in (1, 2):
        learner.reset_reference(step)
    models: list[nn.Module] = [it.model for it in learner.all_trained()]
    assert learner.reference and len(models) == 2
    for it in learner.all_trained():
        for parameter in it.parameters:
            parameter.grad = torch.ones_like(parameter)
        it.optimizer.step()
    used = {it.data_ptr() for it in learner.reference.model.parameters()}
    used |= {address for it in learner.all_trained() for address in places(it.model, it.optimizer)}
    learner.parking.park()
    assert used <= emptied
