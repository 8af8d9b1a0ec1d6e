"""Find the settings nearest to those asked for with which a run fits on GPUs by its plan."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from flows.planning.memory_plan import USABLE, Gpu, Gpus, engines_of, fits, plan
from flows.planning.model_sizes import Model
from tba.config import Config, VLLMEngine
from tba.errors import ConfigError
from tba.interfaces import NamesModels
from tba.tasks.registry import get_task

FRACTION = "engine.memory_fraction"
_MOST = 0.9  # of a GPU, for an engine that has it to itself


def nearest(config: Config, model: Model, gpus: Gpus, keep: Collection[str] = ()) -> Mapping[str, Any] | None:
    """Return the changes of settings nearest to `config` with which the run fits. Changes that only cost time are tried
    before those that change what is learned. Return None if no combination of them fits."""
    choices = _choices(config, gpus, keep)
    tried = next((it for it in choices if _fitting(config, model, gpus, it, keep) is not None), None)
    if tried is None:
        return None
    for change in reversed(tried):  # leave out what is not needed
        without = [it for it in tried if it is not change]
        if _fitting(config, model, gpus, without, keep) is not None:
            tried = without
    return _different(_fitting(config, model, gpus, tried, keep) or {}, config)


def _choices(config: Config, gpus: Gpus, keep: Collection[str]) -> Iterator[Sequence[Mapping[str, Any]]]:
    """Yield changes to make together, more and more of them. If the size of main memory is known, also yield them
    without those that move something there."""
    tried = list[Mapping[str, Any]]()
    for change in _changes(config, gpus):
        if any(_is_kept(name, keep) for name in _different(change, config)):
            continue
        tried.append(change)
        yield list(tried)
        if gpus.main_memory is not None and (lighter := [it for it in tried if not _fills_main_memory(it)]) != tried:
            yield lighter


def _is_kept(name: str, keep: Collection[str]) -> bool:
    """True if `keep` has the name of a setting, or of the section that holds it."""
    return any(name == it or name.startswith(f"{it}.") for it in keep)


def _fills_main_memory(change: Mapping[str, Any]) -> bool:
    return bool(change.get("model.gpu_shifts")) or change.get("training.optimizer") == "adamw-on-host"


def _different(changes: Mapping[str, Any], config: Config) -> Mapping[str, Any]:
    """Return those of the changes that change a setting."""

    def value_of(name: str) -> Any:
        section: Any = config.to_dict()
        for key in name.split("."):
            section = section.get(key)
        return section

    return {name: value for name, value in changes.items() if value != value_of(name)}


def _changes(config: Config, gpus: Gpus) -> Iterator[Mapping[str, Any]]:
    """Yield changes that save memory, each in addition to those before it."""
    training, search, model = config.training, config.search, config.model
    yield {}
    if any(engines_of(config, gpus).values()) and search.batch_responses > 128:
        yield {"search.batch_responses": 128}
    yield _searchers(config, gpus.count - training.ranks - 1)
    if not training.checkpoint_activations:
        yield {"training.checkpoint_activations": True}
    for tokens in (16_384, 8192, 4096, 2048):
        if config.longest <= tokens < (training.tokens_per_micro_batch or math.inf):
            yield {"training.tokens_per_micro_batch": tokens, "training.groups_per_micro_batch": None}
    for ranks in (2, 4, 8):
        if training.ranks < ranks < gpus.count:
            yield {"training.ranks": ranks, **_searchers(config, gpus.count - ranks - 1)}
    if training.ranks == config.engine.gpus == 1:
        yield {"model.gpu_shifts": True, **_searchers(config, gpus.count)}
    task = get_task(config.task)
    options = getattr(task, "options", None)
    if isinstance(task, NamesModels) and getattr(options, "dtype", "") == "float32":
        yield {"task.options.dtype": "bfloat16"}
    if training.optimizer in ("adamw", "adamw-fused") and not model.lora_rank:
        yield {"training.optimizer": "adamw-on-host"}
    if not model.lora_rank or model.dtype == "float32":
        yield {
            "model.lora_rank": model.lora_rank or 16, "model.dtype": "bfloat16", "model.publish_dtype": "bfloat16",
            "training.ranks": 1, "training.optimizer": training.optimizer,
            "training.learning_rate": float(f"{training.learning_rate * (1 if model.lora_rank else 10):g}"),
        }  # fmt: skip


def _searchers(config: Config, most: int) -> Mapping[str, Any]:
    """Return the changes that leave at most so many searchers, but at least one."""
    search, most = config.search, max(1, most)
    if search.searchers <= most:
        return {}
    if config.sync.lag is None:
        return {"search.searchers": most}
    per_round = math.ceil(search.searchers * search.prompts_per_round / most)  # a step still gets as many prompts
    return {"search.searchers": most, "search.prompts_per_round": per_round}


def _fitting(
    config: Config, model: Model, gpus: Gpus, tried: Sequence[Mapping[str, Any]], keep: Collection[str]
) -> Mapping[str, Any] | None:
    """Return all these changes together, if the run then fits; if necessary with another share for engines."""
    changes = {name: value for change in tried for name, value in change.items()}
    try:
        changed = config.replace(changes)
        if fits(changed, model, gpus):
            return changes
        if not _is_kept(FRACTION, keep) and (fraction := _largest_fraction(changed, model, gpus)):
            changes[FRACTION] = fraction
            return changes if fits(config.replace(changes), model, gpus) else None
    except ConfigError:  # settings that exclude each other
        return None
    return None


def _largest_fraction(config: Config, model: Model, gpus: Gpus) -> float:
    """Return the largest share of a GPU that every engine could take; 0 if there is none."""
    if not isinstance(config.engine, VLLMEngine) or config.engine.cache_gigabytes:
        return 0.0
    free = [share for gpu in plan(config, model, gpus).gpus for share in _free_shares(gpu)]
    return max(0.0, min(_MOST, int(100 * min(free, default=0.0)) / 100))


def _free_shares(gpu: Gpu) -> Iterator[float]:
    """Yield the share of a GPU that is left for each engine which uses it at the same time."""
    engines = [load for load in gpu.loads if "vLLM" in load.parts]
    for load in engines:
        at_once = [load] if gpu.in_shifts else engines
        others = gpu.beside(load) + load.needed - sum(it.parts["vLLM"] for it in at_once)
        yield (USABLE * gpu.size - others) / gpu.size / len(at_once)
