"""Estimate the main memory that each role of a run takes on its machine, in bytes by purpose. Nothing here has been
measured beside a GPU."""

import math

from flows.planning import role_memory, trainer_memory
from flows.planning.model_sizes import Model
from flows.planning.role_memory import Generating, Parts
from flows.planning.trainer_memory import BYTES
from storage.weights.memory_versions import KEPT
from tba.config import Config

PROCESS = 1.5e9
"""Bytes that a process takes for itself, with the libraries of CUDA."""
ROOM_BYTES = 2**30
"""Size of a block of pinned memory. Equal to the constant of tba/runtime/host_copies.py, which a plan does not import
because importing torch takes seconds."""


def trainer(config: Config, model: Model, ranks: int = 0) -> Parts:
    """Return the main memory of so many ranks of the trainer, by default of all, on the machine of rank 0. While a
    checkpoint is being stored, the trainer may already have made the copy of the next version. If the store is slow,
    another copy of each may wait, which is not counted."""
    version, checkpoint = trainer_memory.copied(config)
    parts = {"processes": PROCESS * (ranks or config.training.ranks), "trajectories": config.limits.memory_gb * 1e9}
    if hosted := trainer_memory.on_host(config):
        buffers = 2 * model.vocabulary * model.hidden * BYTES[config.model.dtype]
        parts["AdamW"] = hosted * model.parameters + buffers
    if version:
        each = version * model.parameters + _rounding(config, model)
        parts |= {"copy of a version": each, "copy of a checkpoint": checkpoint / version * each}
    if config.sync.transport == "shared-memory" and not config.model.lora_rank:
        many = KEPT + (config.sync.whole_every > 1)
        parts["versions in /dev/shm"] = many * model.parameters * BYTES[config.model.publish_dtype]
    if config.model.gpu_shifts:
        parts["parked"] = _held_between_shifts(config) * model.parameters
    return _at_least(parts, _loading(config, model))


def searcher(config: Config, model: Model, *, vllm: bool) -> Parts:
    reference = config.stores_reference_logps
    parked = role_memory.scorer_weights(config, model) if reference else 0.0
    parts = _generating(config, model, "searcher", parked, vllm=vllm)
    return _at_least(parts, _loading(config, model) if reference else _loading_engine(config, model, vllm=vllm))


def evaluator(config: Config, model: Model, *, vllm: bool) -> Parts:
    """Return the main memory of the evaluator. For each version it loads the policy anew, through main memory: as the
    engine, or for exact log-probabilities beside vLLM."""
    reference = role_memory.measures_reference(config)
    parked = role_memory.scorer_weights(config, model) if reference else 0.0
    loading = _loading(config, model) if reference or vllm else _loading_engine(config, model, vllm=vllm)
    parts = _generating(config, model, "evaluator", parked, vllm=vllm)
    return {**parts, "policy while it loads": loading} if loading else parts


def _generating(config: Config, model: Model, role: Generating, parked: float, *, vllm: bool) -> dict[str, float]:
    """Return the main memory of a searcher or the evaluator after its start. `parked` are the bytes of the reference,
    which leaves the GPU between shifts."""
    # An engine has a process that schedules and, if it is spread over several GPUs, one more for each of them.
    engines = (1 + (config.engine.gpus if config.engine.gpus > 1 else 0)) if vllm else 0
    parts = {"processes": PROCESS * (1 + engines)}
    models = list(role_memory.task_models(config, role))
    if on_cpu := sum(size for used, size in models if used.device == "cpu"):
        parts["models of the task"] = on_cpu
    if config.model.gpu_shifts:
        parked += sum(size for used, size in models if used.device != "cpu")
        weights = model.parameters * BYTES[config.model.publish_dtype]
        parts["parked"] = parked + (role_memory.engine_weights(config, model) if vllm else weights)
    return parts


def _held_between_shifts(config: Config) -> float:
    """Return the bytes per parameter that a trainer moves to main memory when its shift ends: everything but
    gradients."""
    held = dict(trainer_memory.held(config))
    held.pop("gradients", None)
    held.pop("in bfloat16", None)
    if "value model" in held:
        held["value model"] -= BYTES[config.model.dtype]  # its gradients
    return sum(held.values())


def _loading(config: Config, model: Model) -> float:
    """Return the bytes of a policy that is read into main memory before it moves to a GPU."""
    return model.parameters * BYTES[config.model.dtype]


def _loading_engine(config: Config, model: Model, *, vllm: bool) -> float:
    """Return the bytes that an engine reads into main memory first. vLLM reads files directly onto its GPU."""
    return 0.0 if vllm else model.parameters * BYTES[config.model.publish_dtype]


def _at_least(parts: dict[str, float], loading: float) -> Parts:
    """Return the parts of a role, or those at its start if it takes more while it loads its policy."""
    processes = parts["processes"]
    if processes + loading > sum(parts.values()):
        return {"processes": processes, "policy while it loads": loading}
    return parts


def _rounding(config: Config, model: Model) -> float:
    """Return the bytes that a copy of the weights wastes. torch rounds a block of pinned memory up to a power of two,
    and an embedding or an output layer that is larger than `ROOM_BYTES` has a block of its own."""
    matrix = model.vocabulary * model.hidden
    size = matrix * BYTES[config.model.dtype]
    if size <= ROOM_BYTES:
        return 0.0
    return round(model.outside / matrix) * (2 ** math.ceil(math.log2(size)) - size)
