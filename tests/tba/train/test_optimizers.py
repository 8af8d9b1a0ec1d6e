"""Each optimizer, compared with torch's AdamW, and in a trainer. An 8-bit block has 256 numbers and never spans two
rows."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from benchmarks.harness.tiny_models import tiny_llama, tiny_tokenizer
from tba.config import OptimizerName, TrainingConfig
from tba.errors import ConfigError, Stopped
from tba.models.policy import Policy
from tba.train.learner import Learner
from tba.train.optimizers import BLOCK, dequantised, make_optimizer, quantise
from tba.train.training_state import TrainingState, optimizer_tensors
from tests.support.tba.trainers import EVERY, STEPS, Buffer, Journal, LeaseAt, make, settings

NAMES: tuple[OptimizerName, ...] = get_args(OptimizerName)
CPU = torch.device("cpu")
SHAPES = [(40, 300), (3, 20, 256), (5000,), (7, 9), ()]


def wide_policy() -> Policy:
    """Return a policy with weights that are large enough for 8-bit moments."""
    return Policy(tiny_llama(width=64), tiny_tokenizer(), CPU)


def moved(
    name: OptimizerName,
    shapes: list[tuple[int, ...]],
    steps: int,
    *,
    gradients: Any = None,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> list[Tensor]:
    """Return the weights after some steps, by default with random gradients of many sizes."""
    chance = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape, generator=chance).to(dtype)) for shape in shapes]
    training = TrainingConfig(optimizer=name, **changes)
    optimizer = make_optimizer(weights, training, learning_rate=training.learning_rate)
    for step in range(steps):
        for i, weight in enumerate(weights):
            drawn = torch.randn(weight.shape, generator=chance) * 10.0 ** (-i - step % 3)
            weight.grad = (gradients(i, step) if gradients else drawn).to(dtype)
        optimizer.step()
    return [it.detach() for it in weights]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_main_memory_the_bits_are_those_of_fused_adamw(dtype: torch.dtype):
    found, expected = (moved(it, SHAPES, 5, dtype=dtype, weight_decay=0.1) for it in ("adamw-on-host", "adamw-fused"))
    assert all(map(torch.equal, found, expected))


def test_fused_adamw_is_adamw():
    torch.testing.assert_close(moved("adamw-fused", SHAPES, 5), moved("adamw", SHAPES, 5), rtol=1e-5, atol=1e-6)


def test_without_asking_nothing_is_fused_on_a_cpu():
    """Stored runs continue bit for bit with torch's default."""
    weights = [nn.Parameter(torch.ones(3))]
    options = make_optimizer(weights, TrainingConfig(), learning_rate=0.1).defaults
    assert options["fused"] is None and options["foreach"] is None


# --- 8 bits ---


def test_where_gradients_of_a_block_are_one_number_8_bits_lose_nothing():
    """The largest number of a block is represented exactly."""
    shapes, sizes = [(40, 300), (3, 20, 512)], [(40, 2), (3, 20, 2)]
    chance = torch.Generator().manual_seed(1)
    sizes = [torch.rand(size, generator=chance) for size in sizes]

    def gradients(i: int, step: int) -> Tensor:
        return sizes[i].repeat_interleave(BLOCK, dim=-1)[..., : shapes[i][-1]] * (1 + step % 4)

    found, expected = (moved(it, shapes, 20, gradients=gradients) for it in ("adamw-8bit", "adamw-fused"))
    assert all(map(torch.equal, found, expected))


def test_what_is_small_keeps_its_moments_whole():
    shapes = [(63, 64), (5000,), ()]
    assert all(map(torch.equal, moved("adamw-8bit", shapes, 5), moved("adamw-fused", shapes, 5)))


def test_under_a_constant_gradient_8_bits_go_as_far_but_for_what_rounding_takes():
    """Full precision moves each number by the learning rate at each step. Numbers within a factor of 10 of the block's
    largest have a level at most 7 % away, for first and second moments. All numbers of a block grow alike, so a moment
    keeps its nearest level: a step is between 0.93 / sqrt(1.07) and 1.07 / sqrt(0.93) of the learning rate."""
    size = torch.logspace(-1, 0, BLOCK).repeat(20, 1)
    steps, rate, options = 60, 1e-3, {"learning_rate": 1e-3, "adam_eps": 1e-20}
    found = moved("adamw-8bit", [(20, BLOCK)], steps, gradients=lambda i, step: size, **options)
    full = moved("adamw-fused", [(20, BLOCK)], steps, gradients=lambda i, step: size, **options)
    [start] = moved("adamw", [(20, BLOCK)], 0)
    torch.testing.assert_close(start - full[0], torch.full_like(start, steps * rate), rtol=1e-3, atol=1e-6)
    share = (start - found[0]) / (steps * rate)
    assert 0.93 / math.sqrt(1.07) < share.min() < 0.99 and 1.01 < share.max() < 1.07 / math.sqrt(0.93)


def test_however_small_a_gradient_beside_others_no_step_is_much_more_than_the_learning_rate():
    """If a second moment became 0, the next steps would be 1 / sqrt(1 - beta2) = 31 times the learning rate."""
    size = torch.logspace(-7, 0, BLOCK).repeat(20, 1)
    options: dict[str, Any] = {"gradients": lambda i, step: size, "learning_rate": 1e-3, "adam_eps": 1e-20}
    paths = [moved("adamw-8bit", [(20, BLOCK)], steps, **options)[0] for steps in range(12)]
    assert max(float((b - a).abs().max()) for a, b in pairwise(paths)) < 2e-3


def test_a_weight_is_moved_in_parts_as_at_once(monkeypatch: pytest.MonkeyPatch):
    expected = moved("adamw-8bit", SHAPES, 3)
    monkeypatch.setattr("tba.train.optimizers.NUMBERS_AT_ONCE", 1000)
    assert all(map(torch.equal, moved("adamw-8bit", SHAPES, 3), expected))


@given(st.integers(1, 700), st.booleans(), st.floats(1e-25, 1e25), st.integers(0, 2**31))
def test_a_number_comes_back_within_half_a_level_of_its_blocks_largest(columns: int, signed: bool, size: float, seed):
    """The widest levels divide the range from a tenth of the largest number to itself into 64 parts, or 128 if
    unsigned."""
    chance = torch.Generator().manual_seed(seed)
    found_NC = torch.randn(3, columns, generator=chance) * torch.rand(3, columns, generator=chance) ** 8 * size
    found_NC = found_NC if signed else found_NC.abs()
    blocks = math.ceil(columns / BLOCK)
    codes_NC, scales_NB = torch.zeros(3, columns, dtype=torch.uint8), torch.zeros(3, blocks)
    quantise(found_NC, codes_NC, scales_NB, signed=signed)
    again_NC = dequantised(codes_NC, scales_NB, signed=signed)
    for first in range(0, columns, BLOCK):
        block, back = found_NC[:, first : first + BLOCK], again_NC[:, first : first + BLOCK]
        largest = block.abs().amax(dim=1, keepdim=True)
        assert torch.all((back - block).abs() <= 0.9 / (64 if signed else 128) / 2 * largest * 1.0001)
        if not signed:
            assert torch.all(back[largest.expand_as(back) > 0] > 0)


# --- through the trainer ---


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_trainer_takes_the_steps_of_an_unbroken_one(tmp_path: Path, name: OptimizerName):
    """This includes a reset of the optimizer and a skipped step."""
    config = settings(
        training__optimizer=name,
        training__weight_decay=0.1,
        objective__reference_reset=4,
        objective__reset_optimizer=True,
    )
    rewards = {6: math.nan}
    whole, expected = make(tmp_path, config, policy=wide_policy(), rewards=rewards)
    whole.run()
    half, store = make(tmp_path, config, policy=wide_policy(), rewards=rewards, lease=LeaseAt(Stopped("enough"), 5))
    with pytest.raises(Stopped):
        half.run()
    rest, after = make(tmp_path, config, policy=half.learner.policy, rewards=rewards)
    state = store.states[3]
    assert any(key.endswith("_codes") for key in state.optimizer) == (name == "adamw-8bit")
    assert {float(it) for key, it in state.optimizer.items() if key.endswith(".step")} == {1.0}  # after the reset
    rest.resume(state)
    rest.run()
    assert after.digests[STEPS // EVERY] == expected.digests[STEPS // EVERY]
    kept, wanted = (it.states[STEPS // EVERY].optimizer for it in (after, expected))
    assert kept.keys() == wanted.keys() and all(torch.equal(kept[key], it) for key, it in wanted.items())


def test_all_but_8_bits_go_on_from_each_others_checkpoints():
    found = {name: stepped(name, "adamw-fused") for name in ("adamw-fused", "adamw-on-host")}
    assert found["adamw-fused"].snapshot().sha256 == found["adamw-on-host"].snapshot().sha256
    torch.testing.assert_close(
        dict(stepped("adamw-on-host", "adamw").policy.model.named_parameters()),
        dict(found["adamw-fused"].policy.model.named_parameters()),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize(("stored", "chosen"), [("adamw", "adamw-8bit"), ("adamw-8bit", "adamw-on-host")])
def test_moments_are_not_turned_into_8_bits_or_out_of_them(stored: OptimizerName, chosen: OptimizerName):
    with pytest.raises(ConfigError, match=rf"training\.optimizer must be '{stored}'.*got '{chosen}'"):
        stepped(stored, chosen)


def stepped(first: OptimizerName, then: OptimizerName) -> Learner:
    """Take two steps with one optimizer, and two with another that continues from its state."""
    policy, buffer = wide_policy(), Buffer(Journal())
    learners = [Learner(settings(training__optimizer=it), policy) for it in (first, then)]
    for step in range(1, 5):
        if step == 3:
            learners[1].restore(learners[0].state(step=2, sync=1))
        learner = learners[step > 2]
        learner.learn(step, learner.collate(buffer.fetch(buffer.draw(step))))
    return learners[1]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_stored_is_plain_and_comes_back_bit_for_bit(tmp_path: Path, name: OptimizerName):
    policy, buffer = wide_policy(), Buffer(Journal())
    learner = Learner(settings(training__optimizer=name), policy)
    learner.learn(1, learner.collate(buffer.fetch(buffer.draw(1))))
    learner.state(step=1, sync=1).save(tmp_path)
    loaded = TrainingState.load(tmp_path)
    assert loaded.optimizer_name == name and all(type(it) is Tensor for it in loaded.optimizer.values())
    another = Learner(settings(training__optimizer=name), wide_policy())
    another.restore(loaded)
    found, expected = (optimizer_tensors(it.trained.optimizer) for it in (another, learner))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], it) and found[key].dtype == it.dtype for key, it in expected.items())
