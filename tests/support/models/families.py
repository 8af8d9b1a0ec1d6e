"""Tiny random models of many families, each with what the family has of its own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from benchmarks.harness.tiny_models import CHARACTERS, EOS_ID, PAD_ID, tiny_tokenizer

WINDOW = 5
SIZES: Mapping[str, Any] = {
    "vocab_size": len(CHARACTERS) + 3, "pad_token_id": PAD_ID, "bos_token_id": None, "eos_token_id": EOS_ID,
    "initializer_range": 0.3,
}  # fmt: skip
LAYERS: Mapping[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, **SIZES,
}  # fmt: skip
GROUPED: Mapping[str, Any] = {"num_key_value_heads": 2, **LAYERS}
HEADS: Mapping[str, Any] = {"head_dim": 8, **GROUPED}


class Family(NamedTuple):
    config: PretrainedConfig
    packs: bool = True
    """Whether its rows are packed, else padded."""
    generates: bool = True
    """Whether the transformers generator takes it."""
    dtype: torch.dtype = torch.float64
    """The most precise that it computes in."""


FAMILIES = {
    "llama, grouped heads": Family(LlamaConfig(**GROUPED)),
    "qwen2, tied": Family(Qwen2Config(**GROUPED, tie_word_embeddings=True)),  # biases of attention
    "qwen2, a window in one layer": Family(
        Qwen2Config(**GROUPED, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)
    ),
    "qwen3, tied": Family(Qwen3Config(**HEADS, tie_word_embeddings=True)),  # norms of queries and keys
    "qwen3, biases": Family(Qwen3Config(**HEADS, attention_bias=True)),
    "pythia": Family(GPTNeoXConfig(**LAYERS, use_parallel_residual=True)),  # rotates a quarter of each head
    "gpt2": Family(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **SIZES)),
    "mistral, windows": Family(MistralConfig(**GROUPED, sliding_window=WINDOW)),
    "gemma2": Family(
        Gemma2Config(
            **HEADS, sliding_window=WINDOW, query_pre_attn_scalar=8, attn_logit_softcapping=1.0,
            final_logit_softcapping=3.0,
        ),
        packs=False,
    ),
    "gemma3": Family(
        Gemma3TextConfig(
            **HEADS, sliding_window=WINDOW, query_pre_attn_scalar=8, layer_types=["sliding_attention", "full_attention"]
        )
    ),
    "mixtral": Family(MixtralConfig(**GROUPED, num_local_experts=4, sliding_window=None)),
    "qwen3, experts": Family(
        Qwen3MoeConfig(**HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    ),
    "gpt-oss": Family(GptOssConfig(**HEADS, num_local_experts=4, sliding_window=WINDOW), packs=False),  # sinks
    "mamba": Family(
        MambaConfig(hidden_size=32, num_hidden_layers=2, state_size=4, **SIZES), packs=False, generates=False,
        dtype=torch.float32,
    ),
}  # fmt: skip


def family_folder(folder: Path, family: Family, *, seed: int = 0) -> Path:
    """A Hugging Face folder of random weights, in which nothing is zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(family.config)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.1)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
