"""The planned memory of a trainer's step is that which torch's own tracker counts, under fake tensors, which have sizes
but no contents."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from flows.planning import role_memory
from flows.planning.model_sizes import KNOWN, Model
from tba.batches import logprobs, packing
from tba.batches.packing import row_logps
from tba.batches.recomputation import keeping_little
from tba.config import Config
from tba.models.pretrained import computing
from tba.presets import preset
from tests.support.fake_steps import architecture, full_row, with_layers

LAYERS = 4


@pytest.mark.parametrize(
    ("name", "tokens", "changes"),
    [
        ("Qwen/Qwen2.5-0.5B", 8192, {}),
        ("Qwen/Qwen2.5-0.5B", 8192, {"training.checkpoint_activations": True}),
        ("Qwen/Qwen2.5-0.5B", 8192, {"model.dtype": "bfloat16"}),
        ("Qwen/Qwen2.5-1.5B", 16384, {"training.checkpoint_activations": True}),
        ("Qwen/Qwen2.5-0.5B", 1024, {}),  # all logits are kept
    ],
    ids=str,
)
@pytest.mark.parametrize("unpadded", [True, False], ids=["attention at once", "attention in padded calls"])
def test_a_step_takes_the_planned_memory(
    name: str, tokens: int, changes: dict[str, Any], unpadded: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(logprobs, "pieces_on", lambda device: logprobs.ON_GPU)
    monkeypatch.setattr(packing, "why_not", lambda kind: "" if unpadded else "it is not used")
    config = preset("gsm8k").replace(
        {"training.tokens_per_micro_batch": tokens, "training.groups_per_micro_batch": None, **changes}
    )
    size = with_layers(KNOWN[name], LAYERS)
    parts = role_memory.trainer(config, size)
    assert sum(parts.values()) - parts["CUDA"] == pytest.approx(tracked(config, name, size), rel=0.05)


def tracked(config: Config, name: str, size: Model) -> int:
    """Return the greatest number of bytes that exist at once during the second of two steps. Each step has two
    micro-batches, so that gradients exist already while the second is computed."""
    plain, row = architecture(name, size), full_row(config.training.tokens_per_micro_batch or 0)
    with FakeTensorMode(allow_non_fake_inputs=True):
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(plain, dtype=getattr(torch, config.model.dtype))
        model.lm_head.weight = model.model.embed_tokens.weight
        optimizer, tracker = torch.optim.AdamW(model.parameters(), fused=True), MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            for micro_batch in range(4):
                tracker.reset_mod_stats()
                with (
                    computing(model, "bfloat16"),
                    keeping_little(model) if config.training.checkpoint_activations else nullcontext(),
                ):
                    logps = row_logps(model, row, temperature=1.0, tokens_per_call=2**30)
                logps.sum().backward()
                if micro_batch % 2:
                    optimizer.step()
                    optimizer.zero_grad()
        return sum(device["Total"] for device in tracker.get_tracker_snapshot("peak").values())
