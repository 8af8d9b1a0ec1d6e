"""Adapters of tiny models."""

from pathlib import Path

import torch

from tba.models.adapters import Adapter, files_sha256, weights_of
from tba.models.policy import Policy

RANK, ALPHA = 3, 12.0


def adapter_of(base: Path, *, rank: int = RANK, targets: str = "all-linear") -> Adapter:
    return Adapter(
        rank=rank, alpha=ALPHA, targets=targets, base=base, base_name="some/model", base_sha256=files_sha256(base)
    )


def fresh(base: Path, **changes: object) -> Policy:
    return Policy.load_adapted(adapter_of(base, **changes), None, seed=1, device="cpu")  # pyright: ignore


def moved(base: Path, *, seed: int = 2) -> Policy:
    """Return a policy with a new adapter whose B is random instead of zero."""
    policy = fresh(base)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, weights in weights_of(policy.model).items():
            if ".lora_B." in name:
                weights.normal_(std=0.1)
    return policy
