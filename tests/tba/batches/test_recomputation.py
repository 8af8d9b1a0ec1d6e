from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers.modeling_layers import GradientCheckpointingLayer

from benchmarks.harness.fetched import fetched_of
from benchmarks.harness.tiny_models import tiny_llama
from tba.batches.recomputation import keeping_little, layers_of
from tba.errors import ConfigError
from tba.train.learner import Learner
from tba.train.micro_batches import micro_batches
from tests.support.tba.micro_batch_examples import ROWS, make


def learner(little: bool, **changes: Any) -> Learner:
    model: Any = tiny_llama()
    return make(model=model, training__checkpoint_activations=little, **changes)


@contextmanager
def calls_of(model: nn.Module) -> Iterator[Counter[str]]:
    """Count the calls of each attention, which a recomputed layer calls again, and of modules outside of layers."""
    calls, layers = Counter[str](), [name for name, it in model.named_modules() if it in layers_of(model)]
    hooks = [
        it.register_forward_hook(lambda *_, name=name: calls.update([name]))
        for name, it in model.named_modules()
        if name.endswith("self_attn") or not name.startswith(tuple(layers))
    ]
    yield calls
    for hook in hooks:
        hook.remove()


def taken(it: Learner) -> tuple[list[Tensor], Counter[str]]:
    """Return the gradients of a batch, and the calls of the policy's modules."""
    with calls_of(it.policy.model) as calls:
        it.differentiate(it.collate(fetched_of(ROWS)), 0.5)
    parameters = [p for trained in it.all_trained() for p in trained.model.parameters()]
    return [p.grad for p in parameters if p.grad is not None], calls


@pytest.mark.parametrize("name", ["trajectory-balance", "ppo"])
@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("changes", [{}, {"tokens_per_micro_batch": 12}, {"compute_dtype": "bfloat16"}])
def test_gradients_are_the_same_to_the_bit_though_layers_are_computed_again(name, packs, changes):
    """Each pass with gradients computes every layer once more, and nothing else. All passes have gradients if the
    objective does not look ahead and no group is read twice."""
    given = {"packs": packs, "objective__name": name, **{f"training__{it}": to for it, to in changes.items()}}
    (usual, once), (little, more) = taken(learner(False, **given)), taken(learner(True, **given))
    assert len(usual) == len(little) and all(a.equal(b) for a, b in zip(usual, little, strict=True))
    layers, others = ({it for it in once if it.endswith("self_attn") is inside} for inside in (True, False))
    assert layers and others and all(more[it] == once[it] for it in others)
    if name == "trajectory-balance" and "tokens_per_micro_batch" not in changes:
        assert all(more[it] == 2 * once[it] for it in layers)
    else:
        assert all(once[it] < more[it] < 2 * once[it] for it in layers)


@pytest.mark.parametrize("packs", [True, False])
def test_less_is_held_between_forward_and_backward(packs):
    held = {little: _held_bytes(learner(little, packs=packs)) for little in (False, True)}
    assert held[True] < held[False] / 2


def _held_bytes(it: Learner) -> int:
    """Return the bytes that the forward pass of the first micro-batch keeps, without weights."""
    weights = {p.untyped_storage().data_ptr() for p in it.policy.model.parameters()}
    held: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in weights:
            held[place] = tensor.untyped_storage().nbytes()
        return tensor

    batch = it.collate(fetched_of(ROWS))
    part = next(iter(micro_batches(batch, most_groups=None, most_tokens=10**6, packs=it.packs)))
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        it.logps(it.policy.model, part.pieces[0])
    return sum(held.values())


def test_the_model_is_afterwards_as_it_was():
    model = tiny_llama()
    with pytest.raises(ZeroDivisionError), keeping_little(model):
        assert all("forward" in vars(it) for it in layers_of(model))
        _ = 1 / 0
    assert not any("forward" in vars(it) for it in model.modules() if isinstance(it, GradientCheckpointingLayer))
    with torch.no_grad(), keeping_little(model):
        assert not any("forward" in vars(it) for it in layers_of(model))


def test_a_layer_with_a_forward_of_its_own_keeps_it():
    model = tiny_llama()
    layer = layers_of(model)[0]
    layer.forward = own = partial(layer.forward)
    with keeping_little(model):
        assert layer.forward is not own
    assert vars(layer)["forward"] is own


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(ConfigError, match=r"training\.checkpoint_activations must be false for a Linear"):
        layers_of(nn.Linear(1, 1))
