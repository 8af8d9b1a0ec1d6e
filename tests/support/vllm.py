"""Helpers for tests with a real engine of vLLM: a policy with heads of a size that vLLM supports, and marks that skip
the tests if vLLM is not installed. Engines run on the GPU if there is one, with vLLM's build for GPUs."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks.harness.tiny_models import tiny_llama, tiny_tokenizer
from tba.models.policy import Policy
from tests.support.devices import HAS_GPU

ON_CPU = not HAS_GPU
SIMILAR = 2e-4 if ON_CPU else 1e-1
"""Tolerance between float32 log-probabilities of two implementations. On a GPU, vLLM's attention multiplies in TF32,
with a mantissa of ten bits. Of 25,000 tokens, the worst differed by 0.07 on an H100, and the mean was 0.001."""
LACKING = find_spec("vllm") is None and not os.environ.get("TBA_TESTS_NEED_VLLM")
REASON = "vLLM is not installed here: `make test-vllm` installs its build for CPUs beside the environment"
needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.skipif(LACKING, reason=REASON),
    pytest.mark.filterwarnings("default"),  # warnings of vLLM and its imports are not ours
]


def served_policy(*, seed: int = 0, layers: int = 2) -> Policy:
    """Return the tiny policy with a head size of 32."""
    return Policy(tiny_llama(seed=seed, width=128, layers=layers), tiny_tokenizer(), torch.device("cpu"))


def served_folder(folder: Path, *, seed: int = 0, layers: int = 2) -> Path:
    served_policy(seed=seed, layers=layers).snapshot().save(folder)
    return folder


def descendants(pid: int) -> list[int]:
    """Return the ids of all descendants of a process, as Linux lists them."""
    try:
        children = [int(it) for it in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
    return [*children, *(it for child in children for it in descendants(child))]
