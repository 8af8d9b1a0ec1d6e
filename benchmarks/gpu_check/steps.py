"""Measure gradient steps of a model with 1.5 billion parameters: time by part, memory against the plan, and whether
packed rows have the gradient of padded ones.

    python -m benchmarks.gpu_check.steps [--out FOLDER] [--small]

`away` compares the gradient and the log-probabilities of responses with those of padded rows in float32, for the first
micro-batch. In float32 only the order of sums differs; bfloat16 rounds. `attention` names the kernels that ran.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_check import stage
from benchmarks.gpu_check.stage import LARGE, SMALL, Shape
from benchmarks.training import Workload, by_kind, make_rows
from flows.planning import role_memory
from flows.planning.model_sizes import decoder
from tba.batches.batching import Batch, groups_at
from tba.objectives import TrajectoryBalance
from tba.presets import preset
from tba.train.learner import Learner

REPEATS = 3
BETA = 0.01


def measure(small: bool) -> dict[str, Any]:
    shape, groups, tokens = (SMALL, 2, 512) if small else (LARGE, 8, 8192)
    config = preset("gsm8k").replace(
        {
            "training.prompts_per_step": groups, "training.tokens_per_micro_batch": tokens,
            "training.groups_per_micro_batch": None,
        }
    )  # fmt: skip
    config = replace(config, objective=TrajectoryBalance())
    learner = Learner(config, stage.random_policy(shape))
    workload = Workload(name="", hidden=shape.hidden, layers=shape.layers, vocabulary=shape.vocabulary, groups=groups)
    batch = learner.collate(make_rows(workload, config.training.responses_per_prompt))
    return {
        "parameters": sum(it.numel() for it in learner.policy.model.parameters()),
        "attention_pads_because": learner.attention_pads_because,
        "away": compared(learner, groups_at(batch, [0])),
        "step": timed(learner, batch, shape),
    }


def compared(learner: Learner, batch: Batch) -> Mapping[str, Any]:
    """Return how far each way to compute a batch is from padded rows in float32, and the kernels of its attention."""
    forms = {"float32, padded": ("float32", False), "float32, packed": ("float32", True),
             "bfloat16, padded": ("bfloat16", False), "bfloat16, packed": ("bfloat16", True)}  # fmt: skip
    found, kernels, plain = dict[str, Any](), dict[str, list[str]](), learner.config
    for name, (dtype, packs) in forms.items():
        learner.config, learner.packs = plain.replace({"training.compute_dtype": dtype}), packs
        with profile(activities=activities()) as profiled:
            outcomes, _ = learner.differentiate(batch, BETA)
            stage.finish()
        kernels[name] = sorted({it.key for it in profiled.key_averages() if is_attention(it.key)})
        found[name] = torch.tensor([it.logp for it in outcomes], dtype=torch.float64), gradient(learner)
    learner.config, learner.packs = plain, True
    logps, exact = found.pop("float32, padded")
    return {
        name: {
            "gradient": float((grad - exact).norm() / exact.norm()),
            "logp_of_a_response": float((logp - logps).abs().max()),
            "attention": kernels[name],
        }
        for name, (logp, grad) in found.items()
    }


def activities() -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]


def is_attention(name: str) -> bool:
    return any(it in name.lower() for it in ("attention", "flash", "fmha"))


def gradient(learner: Learner) -> torch.Tensor:
    """Return the gradient of all layers, in main memory; that of the vocabulary would take gigabytes."""
    parameters = learner.policy.model.base_model.layers.parameters()  # pyright: ignore
    return torch.cat([it.grad.flatten().cpu() for it in parameters if it.grad is not None])


def timed(learner: Learner, batch: Batch, shape: Shape) -> Mapping[str, Any]:
    tokens, seconds = sum(batch.lengths), dict[str, list[float]]()
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        learner.differentiate(batch, BETA)
        stage.finish()
        seconds.setdefault("forward and backward", []).append(time.perf_counter() - began)
        began = time.perf_counter()
        learner.trained.update(learner.trained.grad_norm(), factor=1.0)
        stage.finish()
        seconds.setdefault("update", []).append(time.perf_counter() - began)
        if torch.cuda.is_available() and len(seconds["update"]) == 1:
            torch.cuda.reset_peak_memory_stats()  # with gradients and moments there
    fastest = {name: min(them[1:]) for name, them in seconds.items()}
    parameters = sum(it.numel() for it in learner.policy.model.parameters())
    step = sum(fastest.values())
    return {
        "tokens": tokens,
        "seconds": {name: round(it, 4) for name, it in fastest.items()},
        "tokens_per_second": round(tokens / step),
        "teraflops": round(6 * parameters * tokens / step / 1e12, 2),  # prompts count once per response
        "seconds_by_kind": by_kind(learner, lambda: learner.differentiate(batch, BETA)),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if torch.cuda.is_available() else None,
        "planned_gb": round(planned(learner, shape) / 1e9, 2),
    }


def planned(learner: Learner, shape: Shape) -> float:
    """Return the memory of a trainer by plan, without that of CUDA itself."""
    keys = shape.key_heads * shape.hidden // shape.heads
    model = decoder(
        vocabulary=shape.vocabulary, hidden=shape.hidden, intermediate=shape.intermediate, layers=shape.layers,
        keys=keys, tied=True, biases=shape.hidden + 2 * keys,
    )  # fmt: skip
    parts = role_memory.trainer(learner.config, model)
    return sum(parts.values()) - parts["CUDA"]


if __name__ == "__main__":
    stage.run("steps", __doc__, measure)
