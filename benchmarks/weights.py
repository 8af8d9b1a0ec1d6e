"""Measure what a new version costs a searcher: publish, fetch and pause, for a hundred versions in a row.

    python -m benchmarks.weights [--hidden 512 --layers 8] [--updates 100] [--out FOLDER]

Each version has its own random weights. It is saved and published in a run on a local disk, fetched (which verifies its
checksums), and adopted by a running engine. Then the engine generates greedily, and so does transformers with the same
weights. Two more times are measured on the same bytes for comparison: a raw copy of the files with an fsync, and a bare
load of the weights in the engine's worker, without the pause around it. Memory is that of the engine's processes, and
on a GPU also all GPU memory in use.

vLLM: run `make test-vllm` and set PYTHONPATH=.tba/vllm, or see docs/gpus.md. Without vLLM only transformers adopts the
versions; it has no pause.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness.hardware import hardware, results_file
from benchmarks.harness.tiny_models import tiny_tokenizer
from storage.runs.run import Run
from storage.weights.versions import Versions
from tba.generation.requests import generate
from tba.generation.transformers_generator import TransformersGenerator
from tba.models.policy import Policy
from tba.types import Prompt, Response, Version

TOKENS = 32
PROMPTS = [Prompt(prompt_id=str(n), text="", tokens=tuple(range(3, 3 + n))) for n in (4, 9, 30)]
SEEDS = [[0]] * len(PROMPTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        result = measure(options, Path(folder), device)
    record = {"measured": f"{datetime.now(UTC):%Y-%m-%d}", **hardware(), **result}
    options.out.mkdir(parents=True, exist_ok=True)
    path = results_file(options.out, "weights")
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(result, indent=1), f"\nwritten to {path}")


def measure(options: argparse.Namespace, folder: Path, device: str) -> dict[str, Any]:
    run = Run.create(str(folder), "weights", config={}, sampler_sql="", code_version="")
    versions, seconds = Versions(run), dict[str, list[float]]()
    plain = TransformersGenerator(device=device, max_response_tokens=TOKENS)
    engine = start_engine(device)
    memory, answers, took = list[tuple[float, float]](), list[tuple[Response, Response]](), timed(seconds)
    parameters = 0
    try:
        for number in range(options.updates + 1):
            version, policy = Version(number, 1), make_policy(options, seed=number)
            parameters = sum(it.numel() for it in policy.model.parameters())
            place = folder / "policy"
            shutil.rmtree(place, ignore_errors=True)
            took("save", policy.snapshot().save, place)
            took("publish", versions.publish, version, step=number, folder=place, weights_sha256="")
            took("raw copy", copy, place, folder / "copy")
            found = took("fetch", versions.load, version)
            if engine and number == 0:
                engine.adopt(found, version)
            elif engine:
                update(engine, found, version, took)
            took("adopt by transformers", plain.adopt, found, version)
            if engine and number:
                ours = generate(engine, PROMPTS, SEEDS, temperature=0.0)
                theirs = generate(plain, PROMPTS, SEEDS, temperature=0.0)
                answers += [(a, b) for [a], [b] in zip(ours, theirs, strict=True)]
                memory.append((engine_megabytes(), gpu_megabytes()))
            versions.prune(keep=2, every=10**9)
    finally:
        if engine:
            engine.close()
    size = sum(path.stat().st_size for path in (folder / "copy").glob("*.safetensors"))
    result = {
        "parameters": parameters,
        "megabytes": round(size / 1e6, 1),
        "updates": options.updates,
        "milliseconds": {name: round(1000 * statistics.median(found), 2) for name, found in seconds.items()},
    }
    if not engine:
        return result
    ends = {"first": memory[0], "tenth": memory[min(9, len(memory) - 1)], "last": memory[-1]}
    return {
        **result,
        "pause_to_bare_load": round(
            statistics.median(a / b for a, b in zip(seconds["pause"], seconds["bare load"], strict=True)), 3
        ),
        **agreement(answers),
        "megabytes_of_the_engine": {name: of_processes for name, (of_processes, _) in ends.items()},
        **({"megabytes_on_the_gpu": {name: it[1] for name, it in ends.items()}} if torch.cuda.is_available() else {}),
    }


def agreement(answers: list[tuple[Response, Response]]) -> dict[str, Any]:
    """Count the greedy responses of the engine that differ from those of transformers, and those that differ from the
    first token on. The latter are of another version. A later difference on a GPU may be a tie between two tokens."""
    named = [a.version_end == b.version_end for a, b in answers]
    same = [(a, b) for a, b in answers if a.tokens == b.tokens]
    apart = [abs(x - y) for a, b in same for x, y in zip(a.logps, b.logps, strict=True)]
    return {
        "responses": len(answers),
        "responses_of_another_version": len(answers) - sum(named),
        "responses_that_differ": len(answers) - len(same),
        "responses_that_differ_from_the_first_token": sum(a.tokens[0] != b.tokens[0] for a, b in answers),
        "greatest_difference_of_log_probabilities": max(apart, default=None),
    }


def update(engine: Any, folder: Path, version: Version, took: Callable[..., Any]) -> None:
    """Adopt a version as a searcher does, then time the pause and the bare load, in alternating order."""
    took("adopt", engine.adopt, folder, version)
    both = [("pause", partial(engine.load_opened, version)), ("bare load", partial(bare_load, engine))]
    for name, work in both if version.number % 2 else reversed(both):
        engine.open_files(folder)
        took(name, work)


def start_engine(device: str) -> Any:
    """Return an engine of vLLM, or None if vLLM is not installed."""
    if find_spec("vllm") is None:
        return None
    from tba.generation.vllm_generator import VLLMGenerator

    return VLLMGenerator(on_cpu=device == "cpu", max_prompt_tokens=64, max_response_tokens=TOKENS)


def make_policy(options: argparse.Namespace, *, seed: int) -> Policy:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=options.vocabulary, hidden_size=options.hidden, intermediate_size=options.hidden * 11 // 4,
        num_hidden_layers=options.layers, num_attention_heads=options.hidden // 64,
        num_key_value_heads=options.hidden // 64, max_position_embeddings=1024, initializer_range=0.1,
        tie_word_embeddings=True, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    return Policy(LlamaForCausalLM(config).eval(), tiny_tokenizer(), torch.device("cpu"))


def timed(seconds: dict[str, list[float]]) -> Callable[..., Any]:
    def took(name: str, work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        result = work(*arguments, **options)
        seconds.setdefault(name, []).append(time.perf_counter() - began)
        return result

    return took


def copy(folder: Path, into: Path) -> None:
    into.mkdir(exist_ok=True)
    for path in folder.iterdir():
        with path.open("rb") as source, (into / path.name).open("wb") as target:
            shutil.copyfileobj(source, target, 2**22)
            target.flush()
            os.fsync(target.fileno())


def bare_load(engine: Any) -> None:
    running = engine.requests.engine
    running.collective_rpc("start_weight_update")
    running.collective_rpc("update_weights", kwargs={"update_info": {}})
    running.collective_rpc("finish_weight_update")


def engine_megabytes() -> float:
    """Return the resident memory of vLLM's processes that this process has started: they are in its process group."""
    total = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            is_ours = os.getpgid(int(status.parent.name)) == os.getpgrp()
            if is_ours and "VLLM" in (status.parent / "cmdline").read_text():
                lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
                total += int(lines["VmRSS"].split()[0])
        except (OSError, KeyError):
            continue
    return round(total / 1000, 1)


def gpu_megabytes() -> float:
    """Return the GPU memory in use, by any process."""
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return round((total - free) / 1e6, 1)


if __name__ == "__main__":
    main()
