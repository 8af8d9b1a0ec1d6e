"""Write a plan of memory in words."""

import json
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from flows.planning import role_memory
from flows.planning.memory_plan import USABLE, Gpu, Gpus, Load, Plan, plan
from flows.planning.model_sizes import Model
from flows.planning.role_memory import Parts
from flows.planning.trainer_memory import in_words
from tba.config import Config
from tba.errors import ConfigError


def assigned(changes: Mapping[str, Any]) -> str:
    """Return changes of settings as `--set` takes them."""
    return " ".join(f"{name}={it if isinstance(it, str) else json.dumps(it)}" for name, it in changes.items())


def table(config: Config, model: Model, gpus: Gpus) -> Iterator[str]:
    """Yield a line for each GPU and for main memory, and below it a line for each role. Equal GPUs side by side share
    lines. At last, say what the plan assumes and what it leaves out."""
    try:
        planned = plan(config, model, gpus)
    except ConfigError as error:
        yield str(error)
        return
    yield from _gpus(planned.gpus)
    yield from _main_memory(planned)
    if config.engine.name == "auto" and gpus.has_vllm is None and any("vLLM" in it for it in _all_parts(planned)):
        yield "engine.name=auto: planned with vLLM, which the machine must have; without it, transformers generates"
    for what in role_memory.uncounted(config):
        yield f"not counted: {what}"


def _all_parts(planned: Plan) -> Iterator[Parts]:
    for gpu in planned.gpus:
        yield from (load.parts for load in gpu.loads)


def _gpus(planned: list[Gpu]) -> Iterator[str]:
    at = 0
    for (_, loads), equal in groupby(planned, key=lambda gpu: (gpu.size, gpu.loads)):
        gpu, count = (same := list(equal))[0], len(same)
        name = f"GPU {at}" if count == 1 else f"GPUs {at} to {at + count - 1}, each"
        at += count
        if not loads:
            yield f"{name}: no role"
            continue
        most = ", one role at a time" if gpu.in_shifts else ""
        yield f"{name}: {in_words(gpu.needed)} of {in_words(USABLE * gpu.size)}{most}, {_verdict(gpu.fits)}"
        for load in loads:
            later = f"; {in_words(load.parked)} between shifts" if gpu.in_shifts else ""
            yield f"  {load.role} {_parts(load.parts)}{_too_small(load)}{later}"


def _main_memory(planned: Plan) -> Iterator[str]:
    needed, there = in_words(planned.main_memory_needed), planned.main_memory
    known = f" of {in_words(USABLE * there)}, {_verdict(planned.main_memory_suffices)}" if there else ""
    yield f"main memory: {needed}{known}"
    for parts, equal in groupby(planned.in_main_memory.items(), key=lambda it: it[1]):
        roles = [role for role, _ in equal]
        name = roles[0] if len(roles) == 1 else f"{roles[0]} to {roles[-1]}, each"
        yield f"  {name} {_parts(parts)}"


def _parts(parts: Parts) -> str:
    return f"{in_words(sum(parts.values()))}: {', '.join(f'{name} {in_words(size)}' for name, size in parts.items())}"


def _too_small(load: Load) -> str:
    return f" (its engine needs at least {in_words(load.least)})" if load.is_too_small else ""


def _verdict(fits: bool) -> str:
    return "fits" if fits else "does not fit"
