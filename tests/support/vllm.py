"""What tests with a real engine of vLLM need: a policy whose heads are of a size that it serves, and why they are
skipped where it is not installed. Engines run on the GPU where there is one, with vLLM's build for it."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks.harness.tiny_models import tiny_llama, tiny_tokenizer
from tba.models.policy import Policy
from tests.support.devices import HAS_GPU

ON_CPU = not HAS_GPU
SIMILAR = 2e-4 if ON_CPU else 2e-2
"""Log-probabilities in float32, of two implementations. On a GPU vLLM's attention multiplies them as TF32, with ten
bits after the point."""
LACKING = find_spec("vllm") is None and not os.environ.get("TBA_TESTS_NEED_VLLM")
REASON = "vLLM is not installed here: `make test-vllm` installs its build for CPUs beside the environment"
needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.skipif(LACKING, reason=REASON),
    pytest.mark.filterwarnings("default"),  # those of vLLM and of what it imports are not ours
]


def served_policy(*, seed: int = 0, layers: int = 2) -> Policy:
    """The tiny policy with heads of 32."""
    return Policy(tiny_llama(seed=seed, width=128, layers=layers), tiny_tokenizer(), torch.device("cpu"))


def served_folder(folder: Path, *, seed: int = 0, layers: int = 2) -> Path:
    served_policy(seed=seed, layers=layers).snapshot().save(folder)
    return folder


def descendants(pid: int) -> list[int]:
    """Of a process, as Linux lists them."""
    try:
        children = [int(it) for it in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
    return [*children, *(it for child in children for it in descendants(child))]
