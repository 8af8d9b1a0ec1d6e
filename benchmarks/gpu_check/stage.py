"""The options, the results file and the random models that all measurements of `gpu_check` share.

Each measurement also runs alone, and with --small on any machine, in seconds, to see that it works.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.harness.hardware import hardware, results_file
from benchmarks.harness.tiny_models import tiny_tokenizer
from tba.models.policy import Policy

RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_heads: int


LARGE = Shape(151_936, 1536, 8960, 28, 12, 2)  # Qwen2.5-1.5B
MEDIUM = Shape(151_936, 896, 4864, 24, 14, 2)  # Qwen2.5-0.5B
SMALL = Shape(2_048, 64, 128, 2, 2, 1)


def run(name: str, description: str | None, measure: Callable[[bool], dict[str, Any]]) -> None:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--small", action="store_true", help="small sizes, on the CPU if there is no GPU")
    options = parser.parse_args()
    if not (options.small or torch.cuda.is_available()):
        parser.error("this measurement needs a GPU; with --small it runs without one")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    record = {"measured": f"{datetime.now(UTC):%Y-%m-%d}", **hardware(), "small": options.small}
    record |= measure(options.small)
    options.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=1)
    results_file(options.out, f"gpu-check-{name}").write_text(text + "\n")
    print(text)


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def finish() -> None:
    """Wait until the GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def random_policy(shape: Shape, *, on: torch.device | None = None, seed: int = 0) -> Policy:
    """Return a policy with random weights, which are made on its device."""
    on = on or device()
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.key_heads,
        tie_word_embeddings=True, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    with on:
        model = Qwen2ForCausalLM(config)
    return Policy(model.eval(), tiny_tokenizer(), on)
