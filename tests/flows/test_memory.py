"""What --dry-run says of memory, against what is really there."""

from pathlib import Path

import pytest
import torch

from flows import memory
from flows.memory import Model
from tba.config import Config
from tba.packed import Group, row_logps
from tba.presets import preset
from tests.tba.tiny import tiny_folder, tiny_llama

LARGE = Model(7_615_616_512, block=233_057_792, outside=1_089_998_336, layers=28, hidden=3584, intermediate=18944)
"""Qwen2.5-7B, as its config says."""


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_is_measured_by_the_heads_of_its_files(tmp_path: Path, tied: bool):
    model, found = tiny_llama(tied=tied), memory.read_model(tiny_folder(tmp_path, tied=tied))
    assert found is not None
    blocks = [sum(it.numel() for it in block.parameters()) for block in model.model.layers]
    parameters = sum(it.numel() for it in model.parameters())
    assert found == Model(parameters, max(blocks), parameters - sum(blocks), len(blocks), 32, 64)


def test_the_sizes_add_up():
    assert LARGE.parameters == LARGE.outside + LARGE.layers * LARGE.block


@pytest.mark.parametrize("width", [32, 64])
def test_activations_are_those_that_autograd_keeps(width: int):
    model, kept = tiny_llama(width=width), dict[int, int]()
    mine = {it.untyped_storage().data_ptr() for it in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in mine:
            kept[storage.data_ptr()] = storage.nbytes()
        held.append(tensor)  # or its place is taken by another
        return tensor

    held: list[torch.Tensor] = []
    group = Group(tuple(range(30)), [tuple(range(60))] * 8)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda it: it):
        row_logps(model, [group], temperature=1.0, tokens_per_call=512)
    size = Model(0, 0, 0, layers=2, hidden=width, intermediate=2 * width)
    found = memory.activations(Config(), size, group.read)
    assert found == pytest.approx(sum(kept.values()), rel=0.25)


@pytest.mark.parametrize(
    ("changes", "bytes_each"),
    [
        ({}, 16),
        ({"model.dtype": "bfloat16"}, 8),
        ({"objective.reference_reset": 50}, 20),
        ({"objective.name": "ppo", "objective.beta_start": 0.05}, 32),
    ],
)
def test_of_each_parameter_all_is_counted_that_training_holds(changes: dict[str, object], bytes_each: int):
    config = preset("quickstart").replace(changes)
    assert sum(memory.held(config).values()) == bytes_each


def test_what_the_page_says_of_seven_billion_parameters():
    text = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text()
    config = preset("math").replace(
        {
            "training.ranks": 4,
            "training.groups_per_micro_batch": None,
            "training.tokens_per_micro_batch": 16384,
        }
    )
    each = sum(memory.held(config).values())
    for size in (
        each * LARGE.parameters / 4,
        memory.whole_at_once(config, LARGE),
        memory.activations(config, LARGE, 1),
        memory.activations(config, LARGE, 16384),
    ):
        assert memory._amount(size) in text, memory._amount(size)
