"""Choose the number format in which a model with float32 weights multiplies matrices. A plan asks too, so this module
does not import torch."""

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

LEAST_PARAMETERS = 2_000_000
"""Smallest model for which bfloat16 is faster on a CPU that multiplies it. With fewer parameters, converting numbers
takes longer than is gained: at 0.1 million bfloat16 took 1.4 times as long as float32, at 0.9 million 0.9 times, and
from 3.7 million on 0.5 to 0.7 times (one and two threads of a processor with AVX512_BF16)."""
_MULTIPLIES = ("amx_bf16", "avx512_bf16")


class ComputeDtype(NamedTuple):
    name: str  # bfloat16 or float32
    why: str


def choose(setting: str, *, device: str, parameters: int) -> ComputeDtype:
    """Return the format for a value of `training.compute_dtype`, a kind of device (`cpu`, `cuda`, ...) and a size of
    model, and the reason."""
    if setting in ("bfloat16", "float32"):
        return ComputeDtype(setting, "training.compute_dtype says so")
    if device != "cpu":
        return ComputeDtype("bfloat16", "the model is on a GPU")
    if setting == "bfloat16-on-gpu":
        return ComputeDtype("float32", "the model is on a CPU")
    instructions = cpu_multiplies_bfloat16()
    if not instructions:
        return ComputeDtype("float32", "this CPU has no instructions that multiply bfloat16")
    if parameters < LEAST_PARAMETERS:
        return ComputeDtype("float32", f"for {parameters:,} parameters this is faster on a CPU")
    return ComputeDtype("bfloat16", f"this CPU multiplies bfloat16 ({instructions})")


@cache
def cpu_multiplies_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the name of the instructions with which this CPU multiplies bfloat16; empty if it has none. Only Linux
    tells, and ARM's instructions have not been measured."""
    try:
        flags = re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        return ""
    known = set(flags[1].split()) if flags else set[str]()
    return next((name.upper() for name in _MULTIPLIES if name in known), "")
