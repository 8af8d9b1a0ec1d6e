"""Compare the tokens per second of our generator with plain `model.generate`, on the same prompts in the same process.

    python benchmarks/generation.py [--out FOLDER]

Weights are random, because speed does not depend on what a model has learned. Both generators run each workload in
turn, several times. The result is the median of the ratios of these pairs, because load on the machine affects both
runs of a pair alike. Plain `generate` reads each prompt once per response, computes finished rows until the end of
their batch, and returns no log-probabilities.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.harness.hardware import hardware, results_file
from tba.generation.requests import generate
from tba.generation.transformers_generator import TransformersGenerator
from tba.models.pretrained import resolve_device
from tba.types import Prompt, Version

REPEATS = 3


@dataclass(frozen=True, kw_only=True)
class Workload:
    """`ends` is the probability of the end token at each position; with 0, all responses have the same length."""

    name: str
    hidden: int
    layers: int
    vocabulary: int
    prompts: int
    prompt_tokens: tuple[int, int]
    samples: int
    response_tokens: int
    ends: float
    batch: int


WORKLOADS = [
    Workload(
        name="quickstart, equal lengths", hidden=128, layers=2, vocabulary=16, prompts=64, prompt_tokens=(8, 8),
        samples=8, response_tokens=6, ends=0, batch=512,
    ),
    Workload(
        name="0.4M, mixed lengths", hidden=128, layers=2, vocabulary=64, prompts=64, prompt_tokens=(8, 40),
        samples=8, response_tokens=192, ends=1 / 32, batch=256,
    ),
    Workload(
        name="3.5M, equal lengths", hidden=256, layers=4, vocabulary=1024, prompts=32, prompt_tokens=(64, 64),
        samples=8, response_tokens=64, ends=0, batch=128,
    ),
    Workload(
        name="3.5M, mixed lengths", hidden=256, layers=4, vocabulary=1024, prompts=32, prompt_tokens=(16, 128),
        samples=8, response_tokens=256, ends=1 / 48, batch=128,
    ),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    folder = parser.parse_args().out
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    path, results = results_file(folder, "generation", cpu=f"cpu-{torch.get_num_threads()}-threads"), []
    for workload in WORKLOADS:  # results are written after each: the last workloads take minutes
        results.append(measure(workload))
        record = {"measured": f"{datetime.now(UTC):%Y-%m-%d}", **hardware(), "results": results}
        path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {path}")


def measure(workload: Workload) -> dict[str, Any]:
    prompts, seeds = make_prompts(workload), make_seeds(workload)
    with tempfile.TemporaryDirectory() as folder:
        write_model(workload, Path(folder))
        generator = TransformersGenerator(batch_responses=workload.batch, max_response_tokens=workload.response_tokens)
        generator.adopt(Path(folder), Version(0, 1))
        model: Any = LlamaForCausalLM.from_pretrained(folder)
    model.to(resolve_device("auto")).eval()

    def ours() -> int:
        responses = generate(generator, prompts, seeds, temperature=1.0)
        return sum(len(response.tokens) for group in responses for response in group)

    for warm_up in (ours, lambda: plain(model, workload, prompts)):
        warm_up()
    pairs = [(speed(ours), speed(lambda: plain(model, workload, prompts))) for _ in range(REPEATS)]
    result = {
        **asdict(workload),
        "tokens_per_second": round(statistics.median(a for a, _ in pairs)),
        "generate_tokens_per_second": round(statistics.median(b for _, b in pairs)),
        "ratio": round(statistics.median(a / b for a, b in pairs), 2),
        "ratios": [round(a / b, 2) for a, b in pairs],
    }
    print(
        f"{workload.name:28} {result['tokens_per_second']:>7} tokens/s, plain generate "
        f"{result['generate_tokens_per_second']:>7}, ratio {result['ratio']}"
    )
    return result


def plain(model: Any, workload: Workload, prompts: list[Prompt]) -> int:
    """Generate all responses with `model.generate`. Return the number of their tokens, without the padding after their
    ends."""
    counted, per_batch = 0, max(1, workload.batch // workload.samples)
    for first in range(0, len(prompts), per_batch):
        piece = prompts[first : first + per_batch]
        width = max(len(p.tokens) for p in piece)
        tokens = torch.tensor([[0] * (width - len(p.tokens)) + list(p.tokens) for p in piece], device=model.device)
        mask = torch.tensor([[0] * (width - len(p.tokens)) + [1] * len(p.tokens) for p in piece], device=model.device)
        rows = model.generate(
            tokens, attention_mask=mask, do_sample=True, top_k=0, num_return_sequences=workload.samples,
            max_new_tokens=workload.response_tokens, pad_token_id=0,
        )  # fmt: skip
        counted += int((rows[:, width:] != 0).sum())
    return counted


def speed(work: Callable[[], int]) -> float:
    began = time.perf_counter()
    tokens = work()
    return tokens / (time.perf_counter() - began)


def make_prompts(workload: Workload) -> list[Prompt]:
    rng = random.Random(0)
    lengths = [rng.randint(*workload.prompt_tokens) for _ in range(workload.prompts)]
    return [
        Prompt(prompt_id=str(i), text="", tokens=tuple(rng.randrange(2, workload.vocabulary) for _ in range(length)))
        for i, length in enumerate(lengths)
    ]


def make_seeds(workload: Workload) -> list[list[int]]:
    return [list(range(i * workload.samples, (i + 1) * workload.samples)) for i in range(workload.prompts)]


def write_model(workload: Workload, folder: Path) -> None:
    """Write a model with small random weights. Its next token is close to uniform, except that <pad> (0) never occurs
    and <eos> (1) occurs with probability `ends`.

    The first hidden dimension is constant, and the output layer reads the logits of these two tokens from it.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=workload.vocabulary, hidden_size=workload.hidden, intermediate_size=workload.hidden * 11 // 4,
        num_hidden_layers=workload.layers, num_attention_heads=workload.hidden // 32,
        num_key_value_heads=workload.hidden // 32, max_position_embeddings=4096, initializer_range=0.02,
        tie_word_embeddings=False, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    constant = workload.hidden**0.5  # value of a dimension that outweighs all others, after the last normalisation
    others = workload.vocabulary - 2
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1e3
        model.lm_head.weight[:, 0] = 0
        model.lm_head.weight[0, 0] = -100 / constant
        odds = workload.ends * others / (1 - workload.ends)
        model.lm_head.weight[1, 0] = torch.log(torch.tensor(max(odds, 1e-40))) / constant
    model.save_pretrained(folder)
    vocabulary = {"<pad>": 0, "<eos>": 1, **{f"t{i}": i for i in range(2, workload.vocabulary)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)


if __name__ == "__main__":
    main()
