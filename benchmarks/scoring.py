"""Compare the time to compute log-probabilities of given responses, as for the reference: packed, padded, and by vLLM.

    python -m benchmarks.scoring [--repeats 3] [--without-vllm] [--out FOLDER]

Weights are random, and groups have eight responses. All forms score the same groups in turn, in one process, several
times. The result is the median of the speed-ups over the padded pass. The forms that use transformers are compared by
CPU time, which other work on the machine hardly affects. vLLM works in other processes, so it is compared by wall-clock
time with the packed pass, in turn.

vLLM: run `make test-vllm` and set PYTHONPATH=.tba/vllm, or see docs/gpus.md.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from benchmarks import generation
from benchmarks.generation import write_model
from benchmarks.harness.hardware import hardware, results_file
from tba.batches.packing import Group
from tba.models.policy import Policy, PolicyScorer
from tba.types import Prompt, Response, Version

VERSION = Version(0, 1)
GROUP = 8
Logps = list[list[tuple[float, ...]]]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """`ends` is the probability that a response ends at each token; with 0, all responses have the same length."""

    name: str
    hidden: int
    layers: int
    vocabulary: int
    groups: int
    prompt_tokens: tuple[int, int] = (64, 256)
    response_tokens: int = 256
    ends: float


WORKLOADS = [
    Workload(
        name="quickstart", hidden=128, layers=2, vocabulary=16, groups=64, prompt_tokens=(8, 8), response_tokens=6,
        ends=0,
    ),
    Workload(name="0.4M, short responses", hidden=128, layers=2, vocabulary=64, groups=16, ends=1 / 32),
    Workload(name="0.4M, long responses", hidden=128, layers=2, vocabulary=64, groups=16, ends=1 / 160),
    Workload(name="3.5M, short responses", hidden=256, layers=4, vocabulary=1024, groups=8, ends=1 / 32),
    Workload(name="3.5M, long responses", hidden=256, layers=4, vocabulary=1024, groups=8, ends=1 / 160),
    Workload(
        name="3.5M, responses of 2048 tokens", hidden=256, layers=4, vocabulary=1024, groups=1, response_tokens=2048,
        ends=0,
    ),
    Workload(name="34M, short responses", hidden=512, layers=8, vocabulary=8192, groups=3, ends=1 / 32),
    Workload(name="34M, long responses", hidden=512, layers=8, vocabulary=8192, groups=2, ends=1 / 160),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--without-vllm", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with_vllm = find_spec("vllm") is not None and not options.without_vllm
    options.out.mkdir(parents=True, exist_ok=True)
    path, results = results_file(options.out, "scoring"), []
    for workload in WORKLOADS:  # results are written after each
        results.append(measure(workload, options.repeats, with_vllm))
        record = {"measured": f"{datetime.now(UTC):%Y-%m-%d}", **hardware(), "results": results}
        path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {path}")


def measure(workload: Workload, repeats: int, with_vllm: bool) -> dict[str, Any]:
    prompts, responses = make_groups(workload)
    with tempfile.TemporaryDirectory() as folder:
        make_model(workload, Path(folder))
        policy = Policy.load(folder)
        engine = EngineScorer(Path(folder), workload, on_cpu=policy.device.type == "cpu") if with_vllm else None
    forms: dict[str, Callable[[], Logps]] = {
        "padded": lambda: padded.token_logps(prompts, responses, temperature=1.0),
        "padded, batches as small as ours": lambda: small.token_logps(prompts, responses, temperature=1.0),
        "packed": lambda: packed.token_logps(prompts, responses, temperature=1.0),
    }
    padded, small, packed = (
        PolicyScorer(policy, VERSION, tokens_per_batch=8192),
        *(PolicyScorer(policy, VERSION) for _ in range(2)),
    )
    padded.packs = small.packs = False
    result = {
        **asdict(workload),
        "parameters": sum(it.numel() for it in policy.model.parameters()),
        "tokens_of_responses": sum(len(r.tokens) for group in responses for r in group),
        "read_by_packed_to_all": round(
            sum(Group(p.tokens, [r.tokens for r in group]).read for p, group in zip(prompts, responses, strict=True))
            / sum(len(p.tokens) + len(r.tokens) for p, group in zip(prompts, responses, strict=True) for r in group),
            3,
        ),
        **in_turn(forms, repeats, clock=time.process_time if policy.device.type == "cpu" else time.perf_counter),
    }
    if engine:
        try:
            scores = {"packed": forms["packed"], "vllm": lambda: engine.token_logps(prompts, responses)}
            found = in_turn(scores, repeats, clock=time.perf_counter)
            result["by_the_clock"] = found
        finally:
            engine.close()
    print(json.dumps({name: result[name] for name in result if name in ("name", "ratio", "by_the_clock")}), flush=True)
    return result


def in_turn(forms: dict[str, Callable[[], Logps]], repeats: int, *, clock: Callable[[], float]) -> dict[str, Any]:
    """Return for each form: its seconds, its speed-up over the first form, and the greatest difference of its numbers
    from the first form."""
    found = {name: form() for name, form in forms.items()}  # the first run of each form is a warm-up
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(repeats):
        for name, form in forms.items():
            began = clock()
            form()
            seconds[name].append(clock() - began)
    first = next(iter(forms))
    ratios = {name: [a / b for a, b in zip(seconds[first], seconds[name], strict=True)] for name in forms}
    return {
        "seconds": {name: round(statistics.median(times), 4) for name, times in seconds.items()},
        "ratio": {name: round(statistics.median(them), 2) for name, them in ratios.items()},
        "ratios": {name: [round(it, 2) for it in them] for name, them in ratios.items()},
        "greatest_difference": {name: float(f"{difference(logps, found[first]):.1e}") for name, logps in found.items()},
    }


def difference(found: Logps, expected: Logps) -> float:
    return max(
        abs(a - b)
        for ours, theirs in zip(found, expected, strict=True)
        for one, other in zip(ours, theirs, strict=True)
        for a, b in zip(one, other, strict=True)
    )


class EngineScorer:
    """Scores responses as part of a prompt: vLLM returns log-probabilities of prompt tokens, at temperature 1 only."""

    def __init__(self, folder: Path, workload: Workload, *, on_cpu: bool):
        from vllm import EngineArgs, SamplingParams  # pyright: ignore[reportMissingImports]

        from tba.generation.vllm_engine import CPU_CACHE, start_engine

        arguments = EngineArgs(
            model=str(folder), skip_tokenizer_init=True, dtype="float32",
            max_model_len=workload.prompt_tokens[1] + workload.response_tokens + 1, max_num_seqs=256,
            max_num_batched_tokens=8192, enable_chunked_prefill=not on_cpu, enforce_eager=on_cpu,
            gpu_memory_utilization=0.3, kv_cache_memory_bytes=int(CPU_CACHE * 2**30) if on_cpu else None,
            generation_config="vllm", disable_log_stats=True,
        )  # fmt: skip
        began = time.perf_counter()
        self.engine = start_engine(arguments, on_cpu=on_cpu, variables={}, tell=lambda resolved: None)
        self.seconds_of_start = time.perf_counter() - began
        self.sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)

    def token_logps(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[Response]]) -> Logps:
        from vllm import TokensPrompt  # pyright: ignore[reportMissingImports]

        found: dict[str, tuple[float, ...]] = {}
        for i, (prompt, group) in enumerate(zip(prompts, responses, strict=True)):
            for j, response in enumerate(group):
                tokens = TokensPrompt(prompt_token_ids=[*prompt.tokens, *response.tokens])
                self.engine.add_request(f"{i}/{j}", tokens, self.sampling)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.finished:
                    i = int(output.request_id.split("/")[0])
                    told = list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))
                    found[output.request_id] = tuple(at[token].logprob for token, at in told[len(prompts[i].tokens) :])
        return [[found[f"{i}/{j}"] for j in range(len(group))] for i, group in enumerate(responses)]

    def close(self) -> None:
        core = self.engine.engine_core
        for process in core.resources.engine_manager.processes:
            process.kill()
            process.join(10)


def make_groups(workload: Workload) -> tuple[list[Prompt], list[list[Response]]]:
    rng = random.Random(0)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(2, workload.vocabulary) for _ in range(length))

    prompts = [
        Prompt(prompt_id=str(i), text="", tokens=tokens(rng.randint(*workload.prompt_tokens)))
        for i in range(workload.groups)
    ]
    return prompts, [[make_response(tokens(length(rng, workload))) for _ in range(GROUP)] for _ in prompts]


def length(rng: random.Random, workload: Workload) -> int:
    tokens = 1
    while tokens < workload.response_tokens and rng.random() >= workload.ends:
        tokens += 1
    return tokens


def make_response(tokens: tuple[int, ...]) -> Response:
    return Response(
        tokens=tokens, logps=(0.0,) * len(tokens), text="", finished=False, temperature=1.0, top_p=1.0, seed=0,
        version_start=VERSION, version_end=VERSION, generate_seconds=0.0,
    )  # fmt: skip


def make_model(workload: Workload, folder: Path) -> None:
    """Write the model of benchmarks/generation.py, with random weights also for the end token."""
    write_model(
        generation.Workload(
            name="", hidden=workload.hidden, layers=workload.layers, vocabulary=workload.vocabulary, prompts=0,
            prompt_tokens=(0, 0), samples=0, response_tokens=0, ends=0, batch=0,
        ),
        folder,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(std=0.1)
        model.lm_head.weight.normal_(std=0.1)
    model.save_pretrained(folder)


if __name__ == "__main__":
    main()
