"""Plan the memory of a run on GPUs: which roles share which GPU, what each of them takes, and whether it fits. If it
does not, find the settings nearest to those asked for with which it does."""

import json
import math
import re
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from flows.planning import role_memory
from flows.planning.model_sizes import Model, find_policy
from flows.planning.trainer_memory import in_words
from flows.supervision.gpus import memory_warnings, usable
from tba.config import Config, VLLMEngine
from tba.errors import ConfigError, RunFailed
from tba.interfaces import NamesModels
from tba.runtime.nvidia import memory_of
from tba.tasks.registry import get_task

_MOST = 0.9  # of a GPU, for an engine that has it to itself
FRACTION = "engine.memory_fraction"
USABLE = 0.95
"""Share of a GPU's memory that processes can use: the driver keeps some, and allocators lose some between pieces."""


@dataclass(frozen=True)
class Gpus:
    """The GPUs that a plan is for, all of one size."""

    count: int
    size: float  # bytes of each

    @classmethod
    def parse(cls, text: str) -> "Gpus":
        """Parse a number of GPUs and the GiB of each: `8x80` is eight with 80 GiB each."""
        parts = re.fullmatch(r"(\d{1,4})x(\d{1,4})", text)
        if not parts or not int(parts[1]) or not int(parts[2]):
            raise ConfigError(f"--gpus must be a number of GPUs and the GiB of each, like 1x24 or 8x80, got {text!r}")
        return cls(int(parts[1]), int(parts[2]) * 2**30)

    def __str__(self) -> str:
        return f"{self.count}x{self.size / 2**30:.0f}"


@dataclass(frozen=True)
class Load:
    """The memory that one role takes on one GPU."""

    role: str
    parts: role_memory.Parts
    least: float = 0.0  # bytes that its vLLM engine needs at least
    parked: float = 0.0  # bytes that stay on the GPU between its shifts

    @property
    def needed(self) -> float:
        return sum(self.parts.values())

    @property
    def is_too_small(self) -> bool:
        """True if the share of its engine is not enough for the engine."""
        return self.parts.get("vLLM", self.least) < self.least


@dataclass
class Gpu:
    """A GPU with its roles, which use it all at once or in shifts."""

    size: float
    roles: list[str] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    in_shifts: bool = False

    @property
    def needed(self) -> float:
        return max((load.needed + self.beside(load) for load in self.loads), default=0.0)

    def beside(self, load: Load) -> float:
        """Return the bytes that all other roles take while this one uses the GPU."""
        return sum(it.parked if self.in_shifts else it.needed for it in self.loads if it is not load)

    @property
    def fits(self) -> bool:
        return self.needed <= USABLE * self.size and not any(load.is_too_small for load in self.loads)


def roles_of(config: Config) -> list[str]:
    """Return the roles that take GPUs, in the order in which they start."""
    return ["trainer", *(f"searcher-{i}" for i in range(config.search.searchers)), "evaluator"]


def place(config: Config, count: int) -> list[list[str]]:
    """Return the roles on each of so many GPUs. `flows.supervision.gpus` places them by the same rule: each role takes
    the GPUs with the fewest roles, and those of the trainer last."""
    placed: list[list[str]] = [[] for _ in range(count)]
    for role in roles_of(config):
        wanted = config.training.ranks if role == "trainer" else config.engine.gpus
        if wanted > count:
            setting = "training.ranks" if role == "trainer" else "engine.tensor_parallel"
            raise ConfigError(f"{setting}: the plan is for {count} GPU{'s' * (count > 1)}, got {wanted}")
        order = sorted(range(count), key=lambda i: ("trainer" in placed[i], len(placed[i]), i))
        for i in order[:wanted]:
            placed[i].append(role)
    return placed


def plan(config: Config, model: Model, gpus: Gpus) -> list[Gpu]:
    shifts = config.model.gpu_shifts
    planned = [Gpu(gpus.size, roles, in_shifts=shifts) for roles in place(config, gpus.count)]
    least = role_memory.least_engine(config, model) if role_memory.uses_vllm(config) else 0.0
    heads = dict[str, int]()  # the first GPU of each role, which holds everything but the engine
    for i, gpu in enumerate(planned):
        for role in gpu.roles:
            crowd = 1 if shifts else max(len(it.roles) for it in planned if role in it.roles)
            first = heads.setdefault(role, i) == i
            if role == "trainer":
                gpu.loads.append(Load(role, role_memory.trainer(config, model), parked=role_memory.CONTEXT))
                continue
            whole = role_memory.evaluator if role == "evaluator" else role_memory.searcher
            parts = (whole if first else role_memory.engine)(config, model, total=gpus.size, roles=crowd)
            gpu.loads.append(Load(role, parts, least, role_memory.parked(config)))
    return planned


def fits(config: Config, model: Model, gpus: Gpus) -> bool:
    try:
        return all(gpu.fits for gpu in plan(config, model, gpus))
    except ConfigError:  # too few GPUs for the ranks or an engine
        return False


# --- if it does not fit -----------------------------------------------------------------------------------------------


def fit(config: Config, asked: str | None, keep: Collection[str] = ()) -> tuple[Gpus | None, Mapping[str, Any]]:
    """Return the GPUs that a run is planned for, and the changes of settings with which it fits on them.

    `asked` is the value of --gpus: the number and size of GPUs, or `here` for those of this machine. Settings in `keep`
    are not changed. If `asked` is None, the run is planned for the GPUs of this machine, and nothing is changed. Raise
    ConfigError with the numbers if no settings were found that fit.
    """
    if asked is not None and config.model.device == "cpu":
        raise ConfigError(f"--gpus does not apply where model.device is 'cpu', got {asked!r}")
    gpus = Gpus.parse(asked) if asked not in (None, "here") else found_here(config)
    if gpus is None:
        if asked == "here":
            raise ConfigError(f"--gpus: there are no GPUs of known size on {socket.gethostname()}, got 'here'")
        return None, {}
    model = find_policy(config)
    if model is None:
        if asked is None or not config.model.path:  # a task makes only small policies
            return gpus, {}
        raise ConfigError(
            f"--gpus: the size of the policy is unknown on this machine: download {config.model.path!r}, or set "
            f"model.path to a folder"
        )
    changes = {} if asked is None else nearest(config, model, gpus, keep)
    if changes is not None:
        return gpus, changes
    lines = "\n".join(table(config, model, gpus))
    raise ConfigError(f"--gpus: the run does not fit on {gpus}, nor with any settings that save memory:\n{lines}")


def warning(config: Config, gpus: Gpus | None) -> str:
    """Return a warning if by the plan a run does not fit on the GPUs. Return an empty text if it does, or if the size
    of the policy is unknown."""
    model = find_policy(config)
    if gpus is None or model is None or fits(config, model, gpus):
        return ""
    lines = "\n".join(table(config, model, gpus))
    return f"by plan the run does not fit on {gpus}; `--gpus here` looks for settings that do:\n{lines}"


def warnings_here(config: Config) -> list[str]:
    """Return a warning for each GPU of this machine that a run may use and another program holds memory of."""
    try:
        return memory_warnings(usable(config))
    except RunFailed:  # the driver does not answer, which a run itself would tell
        return []


def found_here(config: Config) -> Gpus | None:
    """Return the GPUs of this machine that the run may use, as if all had the size of the smallest. Return None if
    there are none, or if their sizes are unknown."""
    try:
        uuids = usable(config)
    except RunFailed:  # the driver does not answer, which a run itself would tell
        return None
    sizes = memory_of(uuids) if uuids else []
    return Gpus(len(sizes), min(sizes)) if sizes else None


def check_there(config: Config, gpus: Gpus | None) -> None:
    """Raise ConfigError if this machine has fewer GPUs than a run was planned for."""
    if gpus and (found := len(usable(config))) < gpus.count:
        raise ConfigError(
            f"--gpus: roles may use {found} GPUs of {socket.gethostname()}, got {gpus}: --dry-run shows the plan for "
            "another machine"
        )


def nearest(config: Config, model: Model, gpus: Gpus, keep: Collection[str] = ()) -> Mapping[str, Any] | None:
    """Return the changes of settings nearest to `config` with which the run fits. Changes that only cost time are tried
    before those that change what is learned. Return None if no combination of them fits."""
    tried = list[Mapping[str, Any]]()
    for change in _changes(config, gpus):
        if set(keep).isdisjoint(_different(change, config)):
            tried.append(change)
            if _fitting(config, model, gpus, tried, keep) is not None:
                break
    else:
        return None
    for change in reversed(tried.copy()):  # leave out what is not needed
        without = [it for it in tried if it is not change]
        if _fitting(config, model, gpus, without, keep) is not None:
            tried = without
    return _different(_fitting(config, model, gpus, tried, keep) or {}, config)


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
    if role_memory.uses_vllm(config) and search.batch_responses > 128:
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
        if FRACTION not in keep and (fraction := _largest_fraction(changed, model, gpus)):
            changes[FRACTION] = fraction
            return changes if fits(config.replace(changes), model, gpus) else None
    except ConfigError:  # settings that exclude each other
        return None
    return None


def _largest_fraction(config: Config, model: Model, gpus: Gpus) -> float:
    """Return the largest share of a GPU that every engine could take; 0 if there is none."""
    if not isinstance(config.engine, VLLMEngine) or config.engine.cache_gigabytes:
        return 0.0
    free = [share for gpu in plan(config, model, gpus) for share in _free_shares(gpu)]
    return max(0.0, min(_MOST, int(100 * min(free, default=0.0)) / 100))


def _free_shares(gpu: Gpu) -> Iterator[float]:
    """Yield the share of a GPU that is left for each engine which uses it at the same time."""
    engines = [load for load in gpu.loads if "vLLM" in load.parts]
    for load in engines:
        at_once = [load] if gpu.in_shifts else engines
        others = gpu.beside(load) + load.needed - sum(it.parts["vLLM"] for it in at_once)
        yield (USABLE * gpu.size - others) / gpu.size / len(at_once)


# --- words ------------------------------------------------------------------------------------------------------------


def assigned(changes: Mapping[str, Any]) -> str:
    """Return changes of settings as `--set` takes them."""
    return " ".join(f"{name}={it if isinstance(it, str) else json.dumps(it)}" for name, it in changes.items())


def table(config: Config, model: Model, gpus: Gpus) -> Iterator[str]:
    """Yield a line for each GPU, and below it a line for each of its roles. Equal GPUs side by side share lines."""
    try:
        planned = plan(config, model, gpus)
    except ConfigError as error:
        yield str(error)
        return
    at = 0
    for (_, loads), equal in groupby(planned, key=lambda gpu: (gpu.size, gpu.loads)):
        gpu, count = (same := list(equal))[0], len(same)
        name = f"GPU {at}" if count == 1 else f"GPUs {at} to {at + count - 1}, each"
        at += count
        if not loads:
            yield f"{name}: no role"
            continue
        verdict = "fits" if gpu.fits else "does not fit"
        most = ", one role at a time" if gpu.in_shifts else ""
        yield f"{name}: {in_words(gpu.needed)} of {in_words(USABLE * gpu.size)}{most}, {verdict}"
        for load in loads:
            parts = ", ".join(f"{name} {in_words(size)}" for name, size in load.parts.items())
            small = f" (its engine needs at least {in_words(load.least)})" if load.is_too_small else ""
            later = f"; {in_words(load.parked)} between shifts" if gpu.in_shifts else ""
            yield f"  {load.role} {in_words(load.needed)}: {parts}{small}{later}"
