"""Measure how long a version takes from the trainer's files to a searcher's engine, by `sync.transport`.

    PYTHONPATH=.tba/vllm python -m benchmarks.publishing.transport [--store s3] [--versions 5] [--out FOLDER]

A policy of the size of SmolLM2-135M is written in bfloat16, each version a small step from the one before. The time
begins when the trainer has written and hashed the files, and ends when the engine has adopted the version. It is
compared with the *bare load* of the same files by the same engine, and with the same version by way of the store: this
machine's disk, or with `--store s3` an S3 server on loopback, for a searcher whose cache does not have the version. The
three follow each other within each version, in an order that changes; a ratio is the median of the ratios of the
versions. Bytes that were written to disks on the way are counted.

Without vLLM, an engine of transformers adopts the versions.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.fleet import root_of
from benchmarks.harness.hardware import hardware, results_file
from benchmarks.harness.tiny_models import tiny_tokenizer
from storage.runs.run import Run
from storage.weights.memory_versions import MemoryVersions, open_memory
from storage.weights.versions import Versions
from tba.generation.transformers_generator import TransformersGenerator
from tba.models.policy import Policy
from tba.types import Version

WAYS = ("bare load", "shared-memory", "storage")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", choices=["disk", "s3"], default="disk")
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TBA_CACHE"] = f"{folder}/cache"
        with root_of(options.store, Path(folder)) as root:
            run = Run.create(root, "transport", config={}, sampler_sql="", code_version="")
            with open_memory(run) as trainer, open_memory(run) as searcher:
                result = measure(options, run, trainer, searcher, Path(folder))
    record = {"measured": f"{datetime.now(UTC):%Y-%m-%d}", **hardware(), **result}
    options.out.mkdir(parents=True, exist_ok=True)
    path = results_file(options.out, f"transport-{options.store}")
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(result, indent=1), f"\nwritten to {path}")


def measure(
    options: argparse.Namespace, run: Run, trainer: MemoryVersions, searcher: MemoryVersions, folder: Path
) -> dict[str, Any]:
    policy, engine = make_policy(options), make_engine()
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    written, scratch = list[int](), (run.folder or folder) / ".scratch"
    scratch.mkdir()
    try:
        for number in range(-1, options.versions):
            version = Version(number + 2, 1)
            in_memory, on_disk = trainer.memory / str(version), scratch / str(version)
            digests = [policy.snapshot().save(it, dtype="bfloat16").sha256s for it in (in_memory, on_disk)]
            if number < 0:
                engine.adopt(in_memory, version)  # the engine starts
                continue

            def by_memory(version: Version = version, folder: Path = in_memory, known: Any = digests[0]) -> None:
                before = bytes_to_disk()
                trainer.offer(version, folder, known)
                assert searcher.newest() == version
                engine.adopt(searcher.load(version), version)
                written.append(bytes_to_disk() - before)

            def by_store(version: Version = version, folder: Path = on_disk, known: Any = digests[1]) -> None:
                versions = Versions(run)
                versions.publish(version, step=version.number, folder=folder, weights_sha256="", sha256s=known)
                if options.store == "s3":
                    os.environ["TBA_CACHE"] = str(scratch / f"cache of a searcher with {version}")
                engine.adopt(versions.load(version), version)

            def bare(version: Version = version, folder: Path = in_memory) -> None:
                engine.adopt(folder, version)

            ways: list[Callable[[], None]] = [bare, by_memory, by_store]
            for at in range(3):
                which = (at + number) % 3
                began = time.perf_counter()
                ways[which]()
                seconds[WAYS[which]].append(time.perf_counter() - began)
            take_step(policy)
    finally:
        engine.close()
    ratios = {way: [a / b for a, b in zip(seconds[way], seconds["bare load"], strict=True)] for way in WAYS[1:]}
    return {
        "parameters": sum(it.numel() for it in policy.model.parameters()),
        "engine": type(engine).__name__,
        "store": options.store,
        "versions": options.versions,
        "milliseconds": {way: round(1000 * statistics.median(found)) for way, found in seconds.items()},
        "ratio_to_bare_load": {
            way: {"median": round(statistics.median(found), 2), "each": [round(it, 2) for it in found]}
            for way, found in ratios.items()
        },
        "bytes_written_to_disks": written,
    }


def bytes_to_disk() -> int:
    """Return how many bytes this process and its engine have written to files of disks. Linux does not count memory."""
    import psutil

    me = psutil.Process()
    return sum(it.io_counters().write_bytes for it in [me, *me.children(recursive=True)])


def make_engine() -> Any:
    if not find_spec("vllm"):
        return TransformersGenerator(device="cpu", max_response_tokens=16)
    from tba.generation.vllm_generator import VLLMGenerator

    return VLLMGenerator(on_cpu=True, dtype="bfloat16", batch_responses=8, max_prompt_tokens=64, max_response_tokens=16)


def make_policy(options: argparse.Namespace) -> Policy:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocabulary, hidden_size=options.hidden, intermediate_size=options.hidden * 8 // 3,
        num_hidden_layers=options.layers, num_attention_heads=options.hidden // 64,
        num_key_value_heads=max(1, options.hidden // 192), max_position_embeddings=1024, tie_word_embeddings=True,
        pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    return Policy(LlamaForCausalLM(config).eval(), tiny_tokenizer(), torch.device("cpu"))


@torch.no_grad()
def take_step(policy: Policy) -> None:
    for parameter in policy.model.parameters():
        parameter.mul_(1 + 1e-2)


if __name__ == "__main__":
    main()
