"""Tell in which number format, and with how many threads, a trainer computes."""

import torch

from storage.runs.arithmetic import Arithmetic
from storage.runs.events import Events
from tba.config import Config
from tba.models.policy import Policy
from tba.models.pretrained import is_lowered
from tba.runtime import compute_dtype


def arithmetic_of(config: Config, policy: Policy) -> Arithmetic:
    """Return how a trainer with these settings computes with its policy on this machine."""
    is_bfloat16 = is_lowered(policy.model, config.training.compute_dtype, policy.device)
    return Arithmetic(
        compute_dtype="bfloat16" if is_bfloat16 else str(policy.model.dtype).removeprefix("torch."),
        device=policy.device.type,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
    )


def tell_compute_dtype(config: Config, policy: Policy, events: Events) -> None:
    if config.model.dtype == "float32":
        size = sum(it.numel() for it in policy.model.parameters())
        name, why = compute_dtype.choose(config.training.compute_dtype, device=policy.device.type, parameters=size)
        events.write("compute-dtype-chosen", f"the trainer multiplies matrices in {name}: {why}", compute_dtype=name)
