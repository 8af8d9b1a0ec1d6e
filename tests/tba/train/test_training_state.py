from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tba.distributed.ranks import Ranks
from tba.errors import Damaged
from tba.train.training_state import TrainingState, check_saved, optimizer_tensors, restore_optimizer


def optimizer_of(weights: list[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(weights, lr=0.1, betas=(0.5, 0.9))


def step(weights: list[nn.Parameter], optimizer: torch.optim.AdamW) -> None:
    optimizer.zero_grad()
    sum((weight**3).sum() * (i + 1) for i, weight in enumerate(weights)).backward()  # pyright: ignore
    optimizer.step()


@pytest.fixture
def weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(3, 2), (4,)]]


def state_of(optimizer: torch.optim.AdamW) -> TrainingState:
    return TrainingState(
        step=7, sync=3, queues={"recent": ["p1", "p2"]}, optimizer=optimizer_tensors(optimizer),
        random=torch.get_rng_state(), reference={"layer.weight": torch.arange(3.0)},
        auxiliary={"value.weights.bias": torch.tensor(0.5)},
    )  # fmt: skip


def test_an_optimizer_goes_on_bit_for_bit_from_what_was_saved(tmp_path, weights):
    optimizer = optimizer_of(weights)
    for _ in range(3):
        step(weights, optimizer)
    state_of(optimizer).save(tmp_path)
    copies = [nn.Parameter(weight.detach().clone()) for weight in weights]
    another = optimizer_of(copies)
    restore_optimizer(another, TrainingState.load(tmp_path).optimizer)
    for _ in range(3):
        step(weights, optimizer)
        step(copies, another)
    assert all(torch.equal(a, b) for a, b in zip(weights, copies, strict=True))


def test_everything_else_comes_back_as_it_was(tmp_path, weights):
    optimizer = optimizer_of(weights)
    step(weights, optimizer)
    state = state_of(optimizer)
    state.save(tmp_path)
    expected = torch.rand(3)
    loaded = TrainingState.load(tmp_path)
    torch.set_rng_state(loaded.random)
    assert torch.equal(torch.rand(3), expected)
    assert (loaded.step, loaded.sync, loaded.queues) == (7, 3, {"recent": ["p1", "p2"]})
    assert loaded.optimizer.keys() == state.optimizer.keys()
    assert loaded.reference and torch.equal(loaded.reference["layer.weight"], torch.arange(3.0))
    assert loaded.auxiliary == {"value.weights.bias": torch.tensor(0.5)}
    (tmp_path / "other").mkdir()
    replace(state, reference=None, auxiliary=None).save(tmp_path / "other")
    other = TrainingState.load(tmp_path / "other")
    assert other.reference is None and other.auxiliary is None


def test_saved_moments_do_not_change_as_training_goes_on(weights):
    optimizer = optimizer_of(weights)
    step(weights, optimizer)
    saved = optimizer_tensors(optimizer)
    before = {name: tensor.clone() for name, tensor in saved.items()}
    step(weights, optimizer)
    assert before.keys() == saved.keys() and all(torch.equal(before[name], saved[name]) for name in saved)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "state.json").unlink(),
        lambda folder: (folder / "optimizer.safetensors").unlink(),
        lambda folder: (folder / "state.json").write_text("{"),
        lambda folder: (folder / "state.json").write_text('{"step": 1}'),
        lambda folder: (folder / "state.json").write_text("[]"),
        lambda folder: (folder / "optimizer.safetensors").write_bytes(b"no tensors"),
        lambda folder: save_file({"optimizer.0.step": torch.zeros(1)}, folder / "optimizer.safetensors"),
        lambda folder: save_file({"random": torch.get_rng_state()}, folder / "optimizer.safetensors"),
    ],
)
def test_whatever_is_wrong_with_a_checkpoint_it_is_damaged_and_named(tmp_path, weights, damage):
    optimizer = optimizer_of(weights)
    step(weights, optimizer)
    state_of(optimizer).save(tmp_path)
    damage(tmp_path)
    with pytest.raises(Damaged, match=f"checkpoint {tmp_path} is not readable"):
        TrainingState.load(tmp_path)


def save_by_two_ranks(folder: Path, weights: list[nn.Parameter]) -> None:
    optimizer = optimizer_of(weights)
    step(weights, optimizer)
    state = replace(state_of(optimizer), ranks=Ranks(0, 2))
    replace(state, ranks=Ranks(1, 2)).save_optimizer(folder)
    state.save(folder)


def test_what_a_trainer_of_several_ranks_saved_can_be_resumed_from(tmp_path, weights):
    save_by_two_ranks(tmp_path, weights)
    check_saved(tmp_path, sync=3, step=7)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("optimizer-00001-of-00002.safetensors", None, "some parts of optimizer are missing: there are optimizer"),
        ("optimizer-00001-of-00002.safetensors", b"no tensors", "optimizer-00001-of-00002.safetensors is as it was"),
        ("reference.safetensors", b"", "reference.safetensors is as it was saved"),
        ("companion.safetensors", b"", "companion.safetensors is as it was saved"),
        ("tokenizer.json", b"{", "tokenizer.json is as it was saved"),
        ("state.json", b'{"step": 7, "sync": 4, "queues": {}}', "it is of sync 4 and step 7, not 3 and 7"),
        (
            "state.json",
            b'{"step": 7, "sync": 3, "queues": {}, "moments": 99}',
            r"6 of 99 tensors optimizer\.\* and random after 7 steps",
        ),
        ("state.json", b"[]", "state.json is as it was saved"),
    ],
)
def test_a_folder_that_no_trainer_can_resume_from_is_damaged_and_the_file_is_named(
    tmp_path, weights, name, content, said
):
    save_by_two_ranks(tmp_path, weights)
    (tmp_path / name).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(Damaged, match=said):
        check_saved(tmp_path, sync=3, step=7)
