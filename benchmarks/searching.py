"""Compare the tokens per second of a searcher on vLLM with the bare engine, and measure what new versions cost it.

    python -m benchmarks.searching [--hidden 512 --layers 8] [--rounds 8] [--repeats 3] [--out FOLDER]

Weights are random, and responses end at random. Five arms run in turn, several times, with the same prompts:

    bare         `vllm.LLM.generate` on all prompts at once, without log-probabilities
    told         the same, with the log-probability of each token, which off-policy learning needs
    searcher     our searcher on vLLM, with rewards, log-probabilities under the reference, Parquet shards on a local
                 disk, and looks for a newer version
    synced       the same, with a new version as often as from a trainer that learns from two rounds per sync
    plain        our searcher on transformers

A searcher never ends, so it is measured between two stored shards; about the same number of responses is in flight at
both. The bare engine ends with a tail of few responses, which the searcher does not have; with more rounds, this tail
matters less.

Needs vLLM: run `make test-vllm` and set PYTHONPATH=.tba/vllm, or see docs/gpus.md.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from vllm import LLM, SamplingParams, TokensPrompt  # pyright: ignore[reportMissingImports]

from benchmarks.generation import Workload, make_prompts, write_model
from benchmarks.harness import fakes
from benchmarks.harness.hardware import hardware, results_file
from storage.log.trajectories import Trajectories
from storage.runs.run import Run
from storage.weights.versions import Versions
from tba.config import Config
from tba.errors import Stopped
from tba.generation.transformers_generator import TransformersGenerator
from tba.generation.vllm_generator import VLLMGenerator
from tba.interfaces import Generator
from tba.models.policy import Policy, PolicyScorer
from tba.search.prompt_stream import PromptStream
from tba.search.searcher import Searcher
from tba.types import Prompt, Response, Reward, Version

PER_ROUND = 8  # prompts
SYNC_EVERY = 2  # rounds


class Distinct(fakes.Task):
    """A task whose reward takes about as long to compute as a comparison of answers."""

    name = "distinct"

    def reward(self, prompt: Prompt, response: Response) -> Reward:
        return Reward(value=len(set(response.tokens)) / len(response.tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--response-tokens", type=int, default=192)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--open-rounds", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    workload = Workload(
        name="searching", hidden=options.hidden, layers=options.layers, vocabulary=options.vocabulary,
        prompts=options.rounds * PER_ROUND, prompt_tokens=(16, 96), samples=options.samples,
        response_tokens=options.response_tokens, ends=4 / options.response_tokens, batch=options.batch,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        result = measure(workload, options, Path(folder), on_cpu=device == "cpu")
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    record = {"measured": f"{datetime.now(UTC):%Y-%m-%d}", **hardware(), **settings, **result}
    options.out.mkdir(parents=True, exist_ok=True)
    path = results_file(options.out, "searching")
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(result, indent=1), f"\nwritten to {path}")


def measure(workload: Workload, options: argparse.Namespace, folder: Path, *, on_cpu: bool) -> dict[str, Any]:
    write_model(workload, model := folder / "model")
    batch, most = workload.batch, workload.response_tokens
    fast = VLLMGenerator(
        on_cpu=on_cpu, dtype=options.dtype, batch_responses=batch, max_prompt_tokens=96, max_response_tokens=most,
        logps="at-one",
    )  # fmt: skip
    slow = TransformersGenerator(dtype=options.dtype, batch_responses=batch, max_response_tokens=most)
    searching = Searching(workload, options, folder, model, fast)
    plain = Searching(workload, options, folder, model, slow)
    try:
        engine = bare_engine(workload, options, model, on_cpu=on_cpu)
        arms: Mapping[str, Callable[[], float]] = {
            "bare": lambda: bare(engine, workload, None),
            "told": lambda: bare(engine, workload, 0),
            "searcher": searching.speed,
            "synced": lambda: searching.speed(synced=True),
            "plain": plain.speed,
        }
        for work in arms.values():  # the first run of each arm is a warm-up
            work()
        searching.lost.clear()
        speeds: dict[str, list[float]] = {name: [] for name in arms}
        for number in range(options.repeats):
            for name in sorted(arms, reverse=number % 2 == 1):
                speeds[name].append(arms[name]())
                print(f"{name:10} {speeds[name][-1]:8.0f} tokens/s", flush=True)
    finally:
        fast.close()

    def ratios(over: str, under: str) -> dict[str, Any]:
        found = [round(a / b, 3) for a, b in zip(speeds[over], speeds[under], strict=True)]
        return {"median": statistics.median(found), "each": found}

    return {
        "parameters": sum(it.numel() for it in Policy.load(model, device="cpu").model.parameters()),
        "tokens_per_second": {name: round(statistics.median(found)) for name, found in speeds.items()},
        "searcher_to_bare": ratios("searcher", "bare"),
        "searcher_to_told": ratios("searcher", "told"),
        "synced_to_searcher": ratios("synced", "searcher"),
        "vllm_to_transformers": ratios("searcher", "plain"),
        "share_of_time_with_new_versions": [round(it, 4) for it in searching.lost],
    }


class Searching:
    """A searcher with its own run. Each measurement continues where the one before was stopped."""

    def __init__(
        self, workload: Workload, options: argparse.Namespace, folder: Path, model: Path, generator: Generator
    ):
        self.rounds, self.model, self.lost = options.rounds, model, list[float]()
        self.run = Run.create(str(folder), type(generator).__name__, config={}, sampler_sql="", code_version="")
        self.versions, self.published = Versions(self.run), 0
        self.publish()
        self.synced, self.first, self.seen, self.began = False, 0, 0, self.now(0, 0.0)
        self.role = Searcher(
            0,
            Config().replace(
                {
                    "search.prompts_per_round": PER_ROUND,
                    "search.responses_per_prompt": workload.samples,
                    "search.batch_responses": workload.batch,
                    "search.max_response_tokens": workload.response_tokens,
                    "search.open_rounds": options.open_rounds,
                    "training.responses_per_prompt": min(workload.samples, Config().training.responses_per_prompt),
                    "engine.in_flight": "update",
                    "limits.data_deadline": 600.0,
                }
            ),
            stream=PromptStream(make_prompts(workload), seed=0, searcher=0, searchers=1, shuffle=False),
            task=Distinct(),
            generator=generator,
            scorer=PolicyScorer(Policy.load(model, dtype=options.dtype), Version(0, 1)),
            reference=Version(0, 1),
            log=Trajectories(self.run),
            versions=self.versions,
            lease=fakes.Lease(stop_when=self.look),
            events=fakes.Events(),
        )

    def publish(self) -> None:
        self.versions.publish(Version(self.published, 1), step=0, folder=self.model, weights_sha256="")
        self.published += 1

    def now(self, tokens: int, adopting: float) -> tuple[float, int, float]:
        return time.perf_counter(), tokens, adopting

    def look(self) -> bool:
        """At each new shard, publish a version if it is due, and start the clock after the first shard. Return True
        once `rounds` more shards have been stored."""
        if self.role.progress.shards != self.seen:
            self.seen = self.role.progress.shards
            if self.synced and self.seen % SYNC_EVERY == 0:
                self.publish()
            if self.seen == self.first + 1:
                self.began = self.now(self.role.progress.tokens, self.role.progress.seconds["adopt"])
        return self.seen >= self.first + 1 + self.rounds

    def speed(self, *, synced: bool = False) -> float:
        self.synced = synced
        self.first = self.seen = self.role.log.next_seq(0)
        with suppress(Stopped):
            self.role.run()
        ended = self.now(self.role.progress.tokens, self.role.progress.seconds["adopt"])
        seconds, tokens, adopting = (end - begin for end, begin in zip(ended, self.began, strict=True))
        if synced:
            self.lost.append(adopting / seconds)
        while self.role.in_flight:  # so that the next measurement begins like this one
            self.role.step()
        self.role.in_flight.ended.clear()
        return tokens / seconds


def bare_engine(workload: Workload, options: argparse.Namespace, model: Path, *, on_cpu: bool) -> LLM:
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # as in our engine
    cpu: dict[str, Any] = (
        {"enforce_eager": True, "kv_cache_memory_bytes": 2**30, "enable_chunked_prefill": False} if on_cpu else {}
    )
    return LLM(
        model=str(model),
        skip_tokenizer_init=True,
        dtype=options.dtype,
        max_model_len=96 + workload.response_tokens,
        max_num_seqs=workload.batch,
        max_num_batched_tokens=8192,
        disable_log_stats=True,
        **({"gpu_memory_utilization": 0.3} | cpu),
    )


def bare(engine: LLM, workload: Workload, logprobs: int | None) -> float:
    sampling = SamplingParams(
        n=workload.samples, temperature=1.0, max_tokens=workload.response_tokens, stop_token_ids=[1],
        detokenize=False, logprobs=logprobs,
    )  # fmt: skip
    asked: Sequence[Any] = [TokensPrompt(prompt_token_ids=list(it.tokens)) for it in make_prompts(workload)]
    began = time.perf_counter()
    outputs = engine.generate(asked, sampling, use_tqdm=False)
    seconds = time.perf_counter() - began
    return sum(len(response.token_ids) for output in outputs for response in output.outputs) / seconds


if __name__ == "__main__":
    main()
