"""Estimate the memory that each role of a run takes on a GPU, in bytes by purpose."""

from collections.abc import Iterator, Mapping

from flows.planning import trainer_memory
from flows.planning.model_sizes import Model, find_model
from flows.planning.trainer_memory import BYTES
from flows.roles.engines import lacks_adapter_kernels
from tba.config import Config, CustomEngine, VLLMEngine
from tba.generation.vllm_profiles import PROFILES
from tba.interfaces import Measures, NamesModels
from tba.tasks.registry import get_task

Parts = Mapping[str, float]

CONTEXT = 0.6e9
"""Bytes that CUDA and its libraries take in each process that uses a GPU."""
COMMUNICATION = 0.6e9
"""Bytes that NCCL takes on each GPU of several ranks."""
GRAPHS = 0.5e9
"""Bytes of the CUDA graphs of an engine."""
SCORED = 8192
"""Tokens of a row in which the reference's log-probabilities are computed on a GPU."""


def trainer(config: Config, model: Model) -> Parts:
    """Return the memory of each rank of the trainer."""
    ranks = config.training.ranks
    tokens, _ = trainer_memory.most_tokens(config)
    parts = {
        "weights and moments": sum(trainer_memory.held(config, model).values()) * model.parameters / ranks,
        "activations": trainer_memory.kept_activations(config, model, tokens),
        "CUDA": CONTEXT,
    }
    head = trainer_memory.output_layer(config, model, tokens)
    recomputed = trainer_memory.recomputed_activations(config, model, tokens)
    parts |= {"recomputed layer": recomputed} if recomputed > head else {"output layer": head}
    if ranks > 1:
        parts["gathered layers"] = trainer_memory.whole_at_once(config, model)
        parts["gradients being summed over ranks"] = max(model.block, model.outside) * BYTES[config.model.dtype]
        parts["CUDA"] += COMMUNICATION
    return parts


def searcher(config: Config, model: Model, *, total: float, roles: int) -> Parts:
    """Return the memory of a searcher on the first of its GPUs. The GPU has `total` bytes and is shared by so many
    roles."""
    parts = dict(engine(config, model, total=total, roles=roles))
    if config.stores_reference_logps:
        parts["reference"] = scorer(config, model)
    if others := sum(_task_models(config, searches=True)):
        parts["models of the task"] = others
    return _with_context(config, parts)


def evaluator(config: Config, model: Model, *, total: float, roles: int) -> Parts:
    """Return the memory of the evaluator, like `searcher`."""
    task, parts = get_task(config.task), dict(engine(config, model, total=total, roles=roles))
    if isinstance(task, Measures) and task.needs_reference:
        parts["reference"] = scorer(config, model)
    if uses_vllm(config) or isinstance(config.engine, CustomEngine):
        parts["policy for exact log-probabilities"] = scorer(config, model)
    if others := sum(_task_models(config, searches=False)):
        parts["models of the task"] = others
    return _with_context(config, parts)


def parked(config: Config) -> float:
    """Return the bytes that a searcher or the evaluator keeps on the GPU between its shifts."""
    return CONTEXT + (GRAPHS + CONTEXT if uses_vllm(config) else 0.0)


def engine(config: Config, model: Model, *, total: float, roles: int) -> Parts:
    """Return the memory of an engine on each of its GPUs."""
    if uses_vllm(config):
        assert isinstance(config.engine, VLLMEngine)
        if size := config.engine.cache_gigabytes:
            return {"vLLM": least_engine(config, model) - cache(config, model) / config.engine.gpus + size * 2**30}
        return {"vLLM": config.engine.fraction(roles) * total}
    if isinstance(config.engine, CustomEngine):
        return {"engine, not counted": 0.0}
    return {
        "policy": model.parameters * BYTES[config.model.publish_dtype],
        "keys and values": config.search.batch_responses * cache(config, model),
        "logits": 3 * config.search.batch_responses * model.vocabulary * 4,
    }


def least_engine(config: Config, model: Model) -> float:
    """Return the bytes that vLLM needs at least on each of its GPUs, to generate one response at a time."""
    assert isinstance(config.engine, VLLMEngine)
    switches = PROFILES[config.engine.profile]
    sampled = 3 * config.search.batch_responses * model.vocabulary * 4
    read = switches.batched_tokens * (4 * model.hidden + 3 * model.intermediate) * 2
    spread = model.parameters * BYTES[config.model.publish_dtype] + cache(config, model)
    return spread / config.engine.gpus + sampled + read + GRAPHS * switches.cuda_graphs + CONTEXT


def cache(config: Config, model: Model) -> float:
    """Return the bytes of keys and values of a longest response with its prompt."""
    return model.cached * BYTES[config.model.publish_dtype] * config.longest


def scorer(config: Config, model: Model) -> float:
    """Return the bytes of a policy that computes log-probabilities and is not trained."""
    size = BYTES[config.model.dtype]
    computed, tokens = trainer_memory.product_bytes(config, model), max(SCORED, config.longest)
    inside = model.parameters - model.outside
    read = tokens * (4 * model.hidden + 3 * model.intermediate) * computed
    head = trainer_memory.pieces_of(config).forward_bytes(tokens, model.vocabulary, number=computed)
    # Weights are loaded in `model.dtype`, and converted afterwards.
    return max(model.parameters * size, model.outside * size + inside * computed + read + head)


def uses_vllm(config: Config) -> bool:
    """True if engines on a GPU are of vLLM, where it is installed."""
    return isinstance(config.engine, VLLMEngine) and not lacks_adapter_kernels(config)


def _task_models(config: Config, *, searches: bool) -> Iterator[float]:
    task = get_task(config.task)
    for used in task.scoring_models() if isinstance(task, NamesModels) else ():
        if (used.searches or not searches) and used.device != "cpu" and (found := find_model(used.place)):
            yield found.parameters * BYTES.get(used.dtype, 4)


def _with_context(config: Config, parts: dict[str, float]) -> Parts:
    """Add what CUDA takes in the process of the role itself. vLLM runs in processes of its own, and counts theirs."""
    return parts | {"CUDA": CONTEXT} if set(parts) != {"vLLM"} else parts
