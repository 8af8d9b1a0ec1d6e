"""How many operations a trainer's step starts. Each takes a fixed time to start, which a GPU waits for: so their number
may grow with layers and micro-batches, but not with rows."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.harness.fetched import fetched_of
from benchmarks.harness.tiny_models import tiny_tokenizer, trajectory
from tba.batches import packing, unpadded_attention
from tba.models.policy import Policy
from tba.presets import preset
from tba.train.learner import Learner


class Counted(TorchDispatchMode):
    operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, kw_only=True)
class Step:
    layers: int = 2
    groups: int = 2
    responses: int = 4
    micro_batches: int = 1
    checkpoint: bool = False


def operations(step: Step) -> int:
    """Return the number of operations of a step's forward and backward pass."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=78, num_hidden_layers=step.layers, **sizes)).eval()
    config = preset("quickstart").replace(
        {
            "search.responses_per_prompt": step.responses,
            "training.prompts_per_step": step.groups,
            "training.responses_per_prompt": step.responses,
            "training.groups_per_micro_batch": step.groups // step.micro_batches,
            "training.computed_rows": "all",
            "training.checkpoint_activations": step.checkpoint,
        }
    )
    learner = Learner(config, Policy(model, tiny_tokenizer(), torch.device("cpu")))
    assert learner.packs
    rows = [
        trajectory(
            prompt_id=f"{group}", prompt_tokens=(4, 5, 6, 7 + group), response_tokens=(10, 11, 12 + i),
            reward=float(i % 2),
        )
        for group in range(step.groups)
        for i in range(step.responses)
    ]  # fmt: skip
    batch = learner.collate(fetched_of(rows))
    with Counted() as counted:
        learner.differentiate(batch, 0.1)
    return counted.operations


@pytest.fixture(params=["at once", "in padded calls"])
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How attention reads a row: as on a GPU, or as on a CPU. A single product stands for the kernel of a GPU."""

    def kernel(query: Tensor, key: Tensor, value: Tensor, *given: Any, **options: Any) -> Tensor:
        return torch.ops.aten.mul.Tensor(query, (key.sum() + value.sum()) / 1e3)

    if request.param == "at once":
        monkeypatch.setattr(packing, "why_not", lambda kind: "")
        monkeypatch.setattr(unpadded_attention, "varlen_attn", kernel)
    return request.param


def test_more_rows_start_no_more_operations(attention: str):
    assert operations(Step(responses=16)) == operations(Step(responses=4))
    assert operations(Step(groups=4)) == operations(Step(groups=2))


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_layer_starts_a_limited_number(attention: str, checkpoint: bool):
    """Views are counted too, which start nothing on a GPU. A layer that is computed again starts its forward pass
    twice."""
    few, many = (operations(Step(layers=layers, checkpoint=checkpoint)) for layers in (2, 6))
    most = {"at once": (270, 410), "in padded calls": (330, 520)}[attention][checkpoint]
    assert 0 < (many - few) / 4 <= most


def test_a_micro_batch_starts_a_limited_number_besides_that_of_its_layers(attention: str):
    one, four = (operations(Step(groups=8, micro_batches=count)) for count in (1, 4))
    of_layers = 2 * (operations(Step(layers=3)) - operations(Step(layers=2)))
    assert 0 < (four - one) / 3 - of_layers <= 230
