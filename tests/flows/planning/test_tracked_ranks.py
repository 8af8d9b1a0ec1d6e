"""The planned memory of one of several ranks is that which torch's own tracker counts, with fake tensors and a process
group that sends nothing."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

from flows.planning import role_memory
from flows.planning.model_sizes import KNOWN, Model
from tba.batches import logprobs, packing
from tba.batches.packing import row_logps
from tba.batches.recomputation import keeping_little
from tba.config import Config
from tba.distributed import sharding
from tba.distributed.ranks import Ranks
from tba.distributed.sharding import ShardedPolicy, shard
from tba.models.policy import Policy
from tba.models.pretrained import attention_of, computing
from tba.presets import preset
from tests.support.fake_steps import architecture, full_row, with_layers

NAME, LAYERS, RANKS = "Qwen/Qwen2.5-0.5B", 4, 4


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let ranks that do not exist take part. The mesh is made before fake tensors, whose numbers it could not read."""
    from torch.distributed._tools import fake_collectives  # noqa: F401  registers collectives of fake tensors

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    made = sharding.init_device_mesh("cpu", (RANKS,))
    monkeypatch.setattr(sharding, "init_device_mesh", lambda kind, shape: made)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("tokens", "changes"),
    [
        (8192, {}),  # the output layer takes most
        (8192, {"training.checkpoint_activations": True}),
        (8192, {"model.dtype": "bfloat16"}),
    ],
    ids=str,
)
@pytest.mark.usefixtures("mesh")
def test_a_step_of_a_rank_takes_the_planned_memory(
    tokens: int, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(logprobs, "pieces_on", lambda device: logprobs.ON_GPU)
    monkeypatch.setattr(packing, "why_not", lambda kind: "")
    limited = {"training.tokens_per_micro_batch": tokens, "training.groups_per_micro_batch": None}
    config = preset("gsm8k").replace({**limited, "training.ranks": RANKS, **changes})
    size = with_layers(KNOWN[NAME], LAYERS)
    parts = role_memory.trainer(config, size)
    assert sum(parts.values()) - parts["CUDA"] == pytest.approx(tracked(config, size, tokens), rel=0.1)


def tracked(config: Config, size: Model, tokens: int) -> int:
    """Return the greatest number of bytes that exist at once while the gradients of the second step are computed. The
    update is left out: torch works out its shapes with whole tensors, which exist nowhere else, and the tracker counts
    them."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = sharded(config, size).model
        optimizer, tracker = torch.optim.AdamW(model.parameters(), fused=True), MemTracker()
        tracker.track_external(model, optimizer)
        for step in range(2):
            with tracker:  # begins with a peak of its own
                for _ in range(2):  # so that gradients exist already while the second micro-batch is computed
                    tracker.reset_mod_stats()
                    with (
                        computing(model, "bfloat16"),
                        keeping_little(model) if config.training.checkpoint_activations else nullcontext(),
                    ):
                        logps = row_logps(model, full_row(tokens), temperature=1.0, tokens_per_call=2**30)
                    logps.sum().backward()
                if step == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        return sum(device["Total"] for device in tracker.get_tracker_snapshot("peak").values())


def sharded(config: Config, size: Model) -> ShardedPolicy:
    plain = architecture(NAME, size)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(plain, dtype=getattr(torch, config.model.dtype), **attention_of(plain))
    bare = Policy(model.eval(), cast(Any, None), torch.device("meta"))
    return shard(bare, Ranks(0, RANKS), torch.device("cpu"), compute_dtype="bfloat16")
