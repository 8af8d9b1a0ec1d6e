"""The memory that --dry-run reports, compared with the memory that is really used."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.harness.tiny_models import tiny_folder, tiny_llama
from flows.planning import describe, role_memory, trainer_memory
from flows.planning.memory_plan import Gpus
from flows.planning.model_sizes import KNOWN, Model
from flows.planning.nearest_settings import nearest
from tba.batches.packing import Group, row_logps
from tba.batches.recomputation import keeping_little
from tba.config import Config, OptimizerName, TrainingConfig
from tba.models.policy import Policy, Snapshot
from tba.models.pretrained import computing
from tba.presets import preset
from tba.train.learner import Learner
from tba.train.trained_model import Trained
from tba.train.training_state import optimizer_tensors

LARGE = KNOWN["Qwen/Qwen2.5-7B"]


@pytest.mark.parametrize(
    ("changes", "within"),
    [({}, 0.1), ({"training.compute_dtype": "bfloat16"}, 0.15), ({"training.checkpoint_activations": True}, 0.25)],
)
def test_activations_are_those_that_autograd_keeps(changes: dict[str, Any], within: float):
    config = Config().replace(changes)
    training, layers = config.training, 4
    model = tiny_llama(width=128, layers=layers)
    found = [kept_for(model, training, responses) for responses in (4, 8)]
    tokens, kept = (
        after - before for before, after in zip(*found, strict=True)
    )  # the difference leaves out the constant part of a row
    size = Model(0, 0, 0, layers=layers, hidden=128, intermediate=256)
    if training.checkpoint_activations:  # autograd does not keep what a layer holds while it is recomputed
        config = config.replace({"training.checkpoint_activations": False})
        kept += trainer_memory.activations(config, replace(size, layers=1), tokens)
        config = config.replace(changes)
    assert trainer_memory.activations(config, size, tokens) == pytest.approx(kept, rel=within)


def kept_for(model: PreTrainedModel, training: TrainingConfig, responses: int) -> tuple[int, int]:
    """Return the tokens of a row, and the bytes that are kept for the backward pass, without weights."""
    mine, held = {it.untyped_storage().data_ptr() for it in model.parameters()}, list[torch.Tensor]()
    sizes: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in mine:
            sizes[storage.data_ptr()] = storage.nbytes()
        held.append(tensor)  # otherwise another tensor could get the same address
        return tensor

    group = Group(tuple(range(30)), [tuple(range(60))] * responses)
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda it: it),
        computing(model, training.compute_dtype),
        keeping_little(model) if training.checkpoint_activations else nullcontext(),
    ):
        row_logps(model, [group], temperature=1.0, tokens_per_call=512)
    return group.read, sum(sizes.values())


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({"training.tokens_per_micro_batch": 8192}, 8192),
        ({"training.tokens_per_micro_batch": 500}, 1024),  # a prompt and a response
        ({"training.tokens_per_micro_batch": 10**6}, 7 * 10_752),
        ({"training.tokens_per_micro_batch": 10**6, "training.ranks": 2}, 4 * 10_752),
        ({"training.tokens_per_micro_batch": 10**6, "training.prompts_per_step": 1}, 10_752),
        ({"training.groups_per_micro_batch": 2}, 2 * 10_752),
        ({"training.groups_per_micro_batch": 2, "training.ranks": 7}, 10_752),
        ({}, 7 * 10_752),
    ],
)
def test_a_micro_batch_has_no_more_tokens_than_a_step_of_a_rank_and_no_fewer_than_a_response(
    changes: dict[str, Any], tokens: int
):
    """A group of gsm8k has 512 + 20 x 512 tokens at full length, and a step 7 groups."""
    config = preset("gsm8k").replace({"training.groups_per_micro_batch": None, **changes})
    assert trainer_memory.most_tokens(config)[0] == tokens


@pytest.mark.parametrize(
    ("changes", "bytes_each"),
    [
        ({}, 18),  # on a GPU, where training computes in bfloat16
        ({"training.ranks": 2}, 16),
        ({"model.device": "cpu"}, 16),
        ({"training.compute_dtype": "float32"}, 16),
        ({"model.dtype": "bfloat16"}, 8),
        ({"model.device": "cpu", "model.lora_rank": 8}, 4),
        ({"model.device": "cpu", "objective.reference_reset": 50}, 20),
        ({"model.device": "cpu", "objective.name": "ppo"}, 32),
        ({"model.device": "cpu", "training.optimizer": "adamw-fused"}, 16),
        ({"model.device": "cpu", "training.optimizer": "adamw-8bit"}, 8 + 2 * 260 / 256),
        ({"model.device": "cpu", "training.optimizer": "adamw-8bit", "objective.name": "ppo"}, 16 + 4 * 260 / 256),
        ({"model.device": "cpu", "training.optimizer": "adamw-on-host"}, 16),
        ({"training.ranks": 2, "training.optimizer": "adamw-on-host"}, 8),
        ({"training.ranks": 2, "training.optimizer": "adamw-8bit"}, 8 + 2 * 260 / 256),
        ({"training.ranks": 2, "objective.name": "ppo"}, 32),
        ({"training.ranks": 2, "model.lora_rank": 8}, 4),
        ({"training.ranks": 2, "model.lora_rank": 8, "objective.reference_reset": 50, "objective.name": "ppo"}, 12),
    ],
)
def test_all_bytes_that_training_holds_for_a_parameter_are_counted(changes: dict[str, object], bytes_each: float):
    config = preset("quickstart").replace(changes)
    assert sum(trainer_memory.held(config).values()) == bytes_each


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_the_moments_of_an_optimizer_take_as_many_bytes_as_reported(
    name: OptimizerName, dtype: Literal["float32", "bfloat16"]
):
    config = Config().replace({"training.optimizer": name, "model.dtype": dtype})
    model = tiny_llama(width=256).to(getattr(torch, dtype))
    trained = Trained(model, config.training, learning_rate=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    trained.optimizer.step()
    moments = sum(it.nbytes for key, it in optimizer_tensors(trained.optimizer).items() if "exp_avg" in key)
    assert moments / sum(it.numel() for it in model.parameters()) == pytest.approx(
        trainer_memory.moments_of(config), rel=0.01
    )


@pytest.mark.parametrize(
    ("changes", "version", "checkpoint"),
    [
        ({}, 4, 12),
        ({"objective.reference_decay": 0.9}, 4, 16),
        ({"objective.name": "ppo"}, 4, 24),
        ({"model.dtype": "bfloat16"}, 2, 6),
    ],
)
def test_copies_that_are_stored_in_the_background_have_the_size_that_is_reported(
    changes: dict[str, object], version: int, checkpoint: int
):
    config = preset("quickstart").replace({**changes, "model.device": "cpu"})
    assert trainer_memory.copied(config) == (version, checkpoint)
    said = trainer_memory.describe(config)
    per = " for each billion"
    assert f"copies in main memory {version} GB{per} while a version is stored, {checkpoint} GB{per} with a" in said


def test_a_copy_of_the_learner_takes_as_many_bytes_as_reported(tmp_path: Path):
    config = preset("quickstart").replace({"model.device": "cpu"})
    policy = Policy.load(tiny_folder(tmp_path))
    learner = Learner(config, policy)
    for parameter in policy.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    learner.trained.optimizer.step()
    snapshot = learner.snapshot()
    assert isinstance(snapshot, Snapshot)
    weights = sum(it.nbytes for it in snapshot.model.parameters())
    moments = sum(it.nbytes for it in learner.state(step=1, sync=1).optimizer.values() if it.numel() > 1)
    size = sum(it.numel() for it in policy.model.parameters())
    version, checkpoint = trainer_memory.copied(config)
    assert weights == version * size and weights + moments == checkpoint * size


@pytest.mark.parametrize(("path", "noted"), [("Qwen/Qwen2.5-7B", "91.4 GB"), ("Qwen/Qwen2.5-1.5B", "")])
def test_a_checkpoint_that_takes_longer_than_the_grace_of_a_stop_is_noted(path: str, noted: str):
    said = describe.describe(preset("quickstart").replace({"model.path": path}))
    notes = [line for line in said.splitlines() if line.startswith("note") and "limits.stop_grace" in line]
    assert len(notes) == bool(noted) and all(f"a checkpoint has {noted}, so a stop" in line for line in notes)


def test_the_page_and_the_plan_say_what_each_optimizer_holds():
    text = (Path(__file__).parents[3] / "docs" / "scaling.md").read_text()
    said = set[str]()
    for name in get_args(OptimizerName):
        config = preset("quickstart").replace({"training.optimizer": name})
        assert f"| `{name}` | {trainer_memory.moments_of(config):.3g} |" in text
        said.update(line for line in describe.describe(config).splitlines() if line.startswith("learning rate "))
    assert len(said) == 4 and all("AdamW" in it for it in said)


@pytest.mark.parametrize(("objective", "each"), [("trajectory-balance", 8), ("ppo", 16)])
def test_what_lies_in_main_memory_is_reported_separately(tmp_path: Path, objective: str, each: int):
    changes = {"training.optimizer": "adamw-on-host", "objective.name": objective, "model.device": "cuda"}
    config = preset("quickstart").replace({**changes, "model.path": str(tiny_folder(tmp_path))})
    size = sum(it.numel() for it in tiny_llama().parameters())
    said = trainer_memory.describe(config)
    assert "AdamW" not in said.partition(";")[0]
    assert said.endswith(f"; in main memory AdamW {each} bytes a parameter: {trainer_memory.in_words(each * size)}")
    assert "in main memory AdamW" not in trainer_memory.describe(config.replace({"model.device": "cpu"}))


def test_the_page_has_the_computed_sizes_for_seven_billion_parameters():
    text = (Path(__file__).parents[3] / "docs" / "scaling.md").read_text()
    config = preset("math").replace(nearest(preset("math"), LARGE, Gpus.parse("8x80")))
    whole = config.replace({"training.checkpoint_activations": False})
    parts, tokens = role_memory.trainer(config, LARGE), config.training.tokens_per_micro_batch
    beside = [
        sum(parts.values()), trainer_memory.kept_activations(config, LARGE, 1),
        trainer_memory.kept_activations(whole, LARGE, tokens), 2 * parts["weights and moments"],
    ]  # fmt: skip
    for size in (*parts.values(), *beside):
        assert trainer_memory.in_words(size) in text, trainer_memory.in_words(size)
