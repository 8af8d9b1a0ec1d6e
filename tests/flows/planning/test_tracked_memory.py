"""The planned memory of a trainer's step is that which torch's own tracker counts, under fake tensors, which have sizes
but no contents."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.initialization import no_init_weights

from flows.planning import role_memory
from flows.planning.model_sizes import KNOWN, Model
from tba.batches import logprobs, packing
from tba.batches.packing import Group, row_logps
from tba.batches.recomputation import keeping_little
from tba.config import Config
from tba.models.pretrained import computing
from tba.presets import preset

LAYERS, RESPONSES, PROMPT = 4, 8, 16
HEADS = {"Qwen/Qwen2.5-0.5B": (14, 2), "Qwen/Qwen2.5-1.5B": (12, 2)}


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


def with_layers(model: Model, layers: int) -> Model:
    return replace(model, layers=layers, parameters=model.outside + layers * model.block)


def tracked(config: Config, name: str, size: Model) -> int:
    """Return the greatest number of bytes that exist at once during the second of two steps. Each step has two
    micro-batches, so that gradients exist already while the second is computed."""
    heads, keys = HEADS[name]
    plain = Qwen2Config(
        vocab_size=size.vocabulary, hidden_size=size.hidden, intermediate_size=size.intermediate,
        num_hidden_layers=size.layers, num_attention_heads=heads, num_key_value_heads=keys, tie_word_embeddings=True,
    )  # fmt: skip
    tokens = config.training.tokens_per_micro_batch or 0
    response = (5,) * ((tokens - PROMPT) // RESPONSES + 1)  # without its last token, as it is not read
    row = [Group(tuple(range(PROMPT)), [response] * RESPONSES)]
    assert row[0].read <= tokens
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
