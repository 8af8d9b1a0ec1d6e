"""Models of several architectures, prompts, and generators based on transformers that serve the models."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, LlamaConfig, MistralConfig, Qwen3Config

from benchmarks.harness.tiny_models import CHARACTERS, EOS_ID, PAD_ID, tiny_tokenizer
from tba.generation.transformers_generator import TransformersGenerator
from tba.types import Prompt, Version

V0, V1 = Version(0, 1), Version(1, 1)
SIZES: dict[str, Any] = {"vocab_size": len(CHARACTERS) + 3, "initializer_range": 0.3}
TOKENS: dict[str, Any] = {"pad_token_id": PAD_ID, "bos_token_id": None, "eos_token_id": EOS_ID}
LLAMA_LIKE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    **SIZES,
    **TOKENS,
}
CONFIGS = {
    "llama": LlamaConfig(**LLAMA_LIKE),
    "qwen3": Qwen3Config(**LLAMA_LIKE, head_dim=8),
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **SIZES, **TOKENS),
    "gpt-neox": GPTNeoXConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, **SIZES, **TOKENS
    ),
    "mistral, window of 5": MistralConfig(**LLAMA_LIKE, sliding_window=5),
}
PROMPTS = ["1+2=", "what is it that you want?", "z", "hello"]


def make_folder(folder: Path, config: Any, *, seed: int = 0) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def make_generator(folder: Path, *, batch: int = 64, limit: int = 12) -> TransformersGenerator:
    generator = TransformersGenerator(device="cpu", batch_responses=batch, max_response_tokens=limit)
    generator.adopt(folder, V0)
    return generator


def make_prompts(texts: list[str]) -> list[Prompt]:
    tokenizer = tiny_tokenizer()
    return [Prompt(prompt_id=t, text=t, tokens=tuple(tokenizer(t).input_ids)) for t in texts]
