"""Plan the memory of a run: which roles share which GPU, what each of them takes of it and of main memory, and whether
it fits."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from flows.planning import role_main_memory, role_memory
from flows.planning.model_sizes import Model
from flows.planning.role_memory import Generating, Parts
from tba.config import Config
from tba.errors import ConfigError

USABLE = 0.95
"""Share of a GPU's memory that processes can use: the driver keeps some, and allocators lose some between pieces. The
same share of main memory is left to a run."""


@dataclass(frozen=True)
class Gpus:
    """The GPUs that a plan is for, all of one size, and what is known of their machine."""

    count: int
    size: float  # bytes of each
    main_memory: float | None = field(default=None, compare=False)  # bytes; None if unknown
    has_vllm: bool | None = field(default=None, compare=False)  # None if unknown

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


def ranks_here(config: Config, count: int) -> int:
    """Return how many ranks of the trainer are on a machine with so many GPUs. With a copy of the weights on each
    machine (`training.copy_per`), a multiple of `count` means several such machines."""
    ranks = config.training.ranks
    return count if config.training.copy_per == "node" and ranks % count == 0 else ranks


def place(config: Config, count: int) -> list[list[str]]:
    """Return the roles on each of so many GPUs. `flows.supervision.gpus` places them by the same rule: each role takes
    the GPUs with the fewest roles, and those of the trainer last."""
    placed: list[list[str]] = [[] for _ in range(count)]
    for role in roles_of(config):
        wanted = ranks_here(config, count) if role == "trainer" else config.engine.gpus
        if wanted > count:
            setting = "training.ranks" if role == "trainer" else "engine.tensor_parallel"
            raise ConfigError(f"{setting}: the plan is for {count} GPU{'s' * (count > 1)}, got {wanted}")
        order = sorted(range(count), key=lambda i: ("trainer" in placed[i], len(placed[i]), i))
        for i in order[:wanted]:
            placed[i].append(role)
    return placed


@dataclass(frozen=True)
class Plan:
    """The memory that the roles of a run need on each GPU, and in the main memory of their machine."""

    gpus: list[Gpu]
    in_main_memory: Mapping[str, Parts]
    main_memory: float | None  # bytes of the machine; None if unknown

    @property
    def main_memory_needed(self) -> float:
        return sum(sum(parts.values()) for parts in self.in_main_memory.values())

    @property
    def main_memory_suffices(self) -> bool:
        return self.main_memory is None or self.main_memory_needed <= USABLE * self.main_memory

    @property
    def fits(self) -> bool:
        return self.main_memory_suffices and all(gpu.fits for gpu in self.gpus)


def plan(config: Config, model: Model, gpus: Gpus) -> Plan:
    """Return the plan of a run. Raise ConfigError if there are too few GPUs for its ranks or an engine, or if an engine
    cannot be used."""
    vllm = engines_of(config, gpus)
    by_kind = {
        "trainer": role_main_memory.trainer(config, model, ranks_here(config, gpus.count)),
        "searcher": role_main_memory.searcher(config, model, vllm=vllm["searcher"]),
        "evaluator": role_main_memory.evaluator(config, model, vllm=vllm["evaluator"]),
    }
    in_main_memory = {role: by_kind[role.partition("-")[0]] for role in roles_of(config)}
    return Plan(_on_gpus(config, model, gpus, vllm), in_main_memory, gpus.main_memory)


def engines_of(config: Config, gpus: Gpus) -> Mapping[Generating, bool]:
    """Return whether vLLM generates for searchers and for the evaluator. If it is unknown whether the machine has vLLM,
    it counts as installed."""
    installed = gpus.has_vllm is not False
    return {kind: role_memory.uses_vllm(config, kind, installed=installed) for kind in ("searcher", "evaluator")}


def fits(config: Config, model: Model, gpus: Gpus) -> bool:
    try:
        return plan(config, model, gpus).fits
    except ConfigError:
        return False


def _on_gpus(config: Config, model: Model, gpus: Gpus, vllm: Mapping[Generating, bool]) -> list[Gpu]:
    shifts = config.model.gpu_shifts
    planned = [Gpu(gpus.size, roles, in_shifts=shifts) for roles in place(config, gpus.count)]
    heads = dict[str, int]()  # the first GPU of each role, which holds everything but the engine
    for i, gpu in enumerate(planned):
        for role in gpu.roles:
            crowd = 1 if shifts else max(len(it.roles) for it in planned if role in it.roles)
            first = heads.setdefault(role, i) == i
            if role == "trainer":
                parts = role_memory.trainer(config, model, ranks_here(config, gpus.count))
                gpu.loads.append(Load(role, parts, parked=role_memory.CONTEXT))
                continue
            gpu.loads.append(_generating(config, model, role, crowd, total=gpus.size, whole=first, vllm=vllm))
    return planned


def _generating(
    config: Config, model: Model, role: str, roles: int, *, total: float, whole: bool, vllm: Mapping[Generating, bool]
) -> Load:
    """Return the load of a searcher or the evaluator on a GPU that so many roles share. Unless `whole`, only a part of
    its engine is there."""
    kind: Generating = "evaluator" if role == "evaluator" else "searcher"
    uses_vllm = vllm[kind]
    if whole:
        count = role_memory.evaluator if kind == "evaluator" else role_memory.searcher
        parts = count(config, model, total=total, roles=roles, vllm=uses_vllm)
    else:
        parts = role_memory.engine(config, model, kind, total=total, roles=roles, vllm=uses_vllm)
    least = role_memory.least_engine(config, model) if uses_vllm else 0.0
    return Load(role, parts, least, role_memory.parked(vllm=uses_vllm))
