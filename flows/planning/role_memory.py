"""Estimate the memory that each role of a run takes on a GPU, in bytes by purpose."""

from collections.abc import Iterator, Mapping
from typing import Literal

from flows.planning import trainer_memory
from flows.planning.model_sizes import Model, find_model
from flows.planning.trainer_memory import BYTES
from flows.roles.engines import choose, evaluation_sampling, search_sampling
from tba.config import Config, CustomEngine, VLLMEngine
from tba.generation.vllm_profiles import PROFILES
from tba.interfaces import Measures, NamesModels, UsedModel, UsesModels
from tba.tasks.registry import get_task

Parts = Mapping[str, float]
Generating = Literal["searcher", "evaluator"]
"""A kind of role that has an engine."""

CONTEXT = 0.6e9
"""Bytes that CUDA and its libraries take in each process that uses a GPU."""
COMMUNICATION = 0.6e9
"""Bytes that NCCL takes on each GPU of several ranks."""
GRAPHS = 0.5e9
"""Bytes of the CUDA graphs of an engine."""
SPARE = 1.5
"""Room for keys and values that transformers takes, as a multiple of what it needs: it makes room in advance."""
SCORED = 8192
"""Tokens of a row in which the reference's log-probabilities are computed on a GPU."""


def trainer(config: Config, model: Model, divided: int = 0) -> Parts:
    """Return the memory of each rank of the trainer, at the moment of a step when it takes most. `divided` is the
    number of ranks that hold one copy of the weights; 0 means all."""
    ranks = config.training.ranks
    return {
        "weights and moments": sum(trainer_memory.held(config, model).values()) * model.parameters / (divided or ranks),
        **max(_moments_of_step(config, model), key=lambda parts: sum(parts.values())),
        "CUDA": CONTEXT + (COMMUNICATION if ranks > 1 else 0.0),
    }


def _moments_of_step(config: Config, model: Model) -> Iterator[Parts]:
    """Yield what a rank takes in addition at each moment of a backward pass that may take most: in the output layer, in
    a block, and at the end, when activations are free and several ranks sum the gradients outside of blocks."""
    tokens, _ = trainer_memory.most_tokens(config)
    kept = {"activations": trainer_memory.kept_activations(config, model, tokens)}
    head = {**kept, "output layer": trainer_memory.output_layer(config, model, tokens)}
    again = trainer_memory.recomputed_activations(config, model, tokens)
    block = {**kept, **({"recomputed layer": again} if again else {})}
    if config.training.ranks == 1:
        yield from (head, block)
        return
    number, adapted = trainer_memory.product_bytes(config, model), bool(config.model.lora_rank)
    summed = 0 if adapted else BYTES[config.model.dtype]
    gathered, summing = "gathered layers", "gradients being summed over ranks"
    values = number * model.outside if trainer_memory.learns_values(config) else 0
    yield {**head, gathered: number * model.outside + values}
    # torch keeps the sum of the previous block until the one of this block is complete.
    whole = trainer_memory.whole_at_once(config, model) + values
    yield {**block, gathered: whole, summing: 2 * summed * model.block}
    yield {gathered: (1 if adapted else 2) * number * model.outside + values, summing: summed * model.outside}


def searcher(config: Config, model: Model, *, total: float, roles: int, vllm: bool) -> Parts:
    """Return the memory of a searcher on the first of its GPUs. The GPU has `total` bytes and is shared by so many
    roles. `vllm` says whether vLLM generates."""
    parts = dict(engine(config, model, "searcher", total=total, roles=roles, vllm=vllm))
    if config.stores_reference_logps:
        parts["reference"] = scorer(config, model)
    if others := sum(size for it, size in task_models(config, "searcher") if it.device != "cpu"):
        parts["models of the task"] = others
    return _with_context(parts)


def evaluator(config: Config, model: Model, *, total: float, roles: int, vllm: bool) -> Parts:
    """Return the memory of the evaluator, like `searcher`."""
    parts = dict(engine(config, model, "evaluator", total=total, roles=roles, vllm=vllm))
    if measures_reference(config):
        parts["reference"] = scorer(config, model)
    if vllm or isinstance(config.engine, CustomEngine):
        parts["policy for exact log-probabilities"] = scorer(config, model)
    if others := sum(size for it, size in task_models(config, "evaluator") if it.device != "cpu"):
        parts["models of the task"] = others
    return _with_context(parts)


def parked(*, vllm: bool) -> float:
    """Return the bytes that a searcher or the evaluator keeps on the GPU between its shifts."""
    return CONTEXT + (GRAPHS + CONTEXT if vllm else 0.0)


def engine(config: Config, model: Model, role: Generating, *, total: float, roles: int, vllm: bool) -> Parts:
    """Return the memory of an engine on each of its GPUs."""
    if vllm:
        assert isinstance(config.engine, VLLMEngine)
        if size := config.engine.cache_gigabytes:
            return {"vLLM": least_engine(config, model) - cache(config, model) / config.engine.gpus + size * 2**30}
        return {"vLLM": config.engine.fraction(roles) * total}
    if isinstance(config.engine, CustomEngine):
        return {"engine, not counted": 0.0}
    rows = at_once(config, role)
    return {
        "policy": model.parameters * BYTES[config.model.publish_dtype],
        "keys and values": SPARE * rows * cache(config, model),
        "logits": 3 * rows * model.vocabulary * 4,
    }


def least_engine(config: Config, model: Model) -> float:
    """Return the bytes that vLLM needs at least on each of its GPUs, to generate one response at a time."""
    assert isinstance(config.engine, VLLMEngine)
    switches = PROFILES[config.engine.profile]
    # Before it generates, vLLM tries a batch of this size, even if rounds are smaller.
    sampled = 3 * config.search.batch_responses * model.vocabulary * 4
    read = switches.batched_tokens * (4 * model.hidden + 3 * model.intermediate) * 2
    spread = engine_weights(config, model) + cache(config, model)
    return spread / config.engine.gpus + sampled + read + GRAPHS * switches.cuda_graphs + CONTEXT


def engine_weights(config: Config, model: Model) -> float:
    """Return the bytes of the weights of an engine of vLLM, on all of its GPUs. Of the weights in layers, only those of
    norms, biases and scales are not rounded; they are so few that they count like the others."""
    size = BYTES[config.model.publish_dtype]
    rounded = 1 if isinstance(config.engine, VLLMEngine) and config.engine.quantization else size
    return model.outside * size + (model.parameters - model.outside) * rounded


def cache(config: Config, model: Model) -> float:
    """Return the bytes of keys and values of a longest response with its prompt."""
    return model.cached * BYTES[config.model.publish_dtype] * config.longest


def at_once(config: Config, role: Generating) -> int:
    """Return the maximum number of responses that a role generates at the same time."""
    search, evaluation = config.search, config.evaluation
    if role == "evaluator":
        most = evaluation.prompts * max(1, evaluation.samples)
    elif search.value_samples:  # each state of each response is continued, so there are always enough
        most = search.batch_responses
    else:
        most = config.responses_per_round * search.open_rounds
    return min(search.batch_responses, most)


def scorer(config: Config, model: Model) -> float:
    """Return the bytes of a policy that computes log-probabilities and is not trained."""
    size = BYTES[config.model.dtype]
    computed, tokens = trainer_memory.product_bytes(config, model), max(SCORED, config.longest)
    read = tokens * (4 * model.hidden + 3 * model.intermediate) * computed
    head = trainer_memory.pieces_of(config).forward_bytes(tokens, model.vocabulary, number=computed)
    # Weights are loaded in `model.dtype`, and converted afterwards.
    return max(model.parameters * size, scorer_weights(config, model) + read + head)


def scorer_weights(config: Config, model: Model) -> float:
    """Return the bytes of the weights of such a policy, once they are converted to the format of their products."""
    inside = (model.parameters - model.outside) * trainer_memory.product_bytes(config, model)
    return model.outside * BYTES[config.model.dtype] + inside


def uses_vllm(config: Config, role: Generating, *, installed: bool = True) -> bool:
    """True if vLLM generates for a role on a GPU. `installed` says whether vLLM is installed there. Raise ConfigError
    if the settings demand an engine that cannot be used."""
    if role == "searcher":
        sampling = search_sampling(config)
    else:
        sampling = evaluation_sampling(config, reads_logps=measures_reference(config))
    return choose(config, sampling, device="cuda", installed=installed).name == "vllm"


def task_models(config: Config, role: Generating) -> Iterator[tuple[UsedModel, float]]:
    """Yield each model of the task that a role loads and whose size is known, with its bytes."""
    for used in _named(config):
        if (used.searches or role == "evaluator") and (found := find_model(used.place)):
            yield used, found.parameters * BYTES.get(used.dtype, 4)


def uncounted(config: Config) -> list[str]:
    """Return what a plan leaves out, because nothing says how large it is."""
    task = get_task(config.task)
    unknown = list(dict.fromkeys(used.place for used in _named(config) if not find_model(used.place)))
    out = [f"models of the task whose size is unknown on this machine: {', '.join(unknown)}"] if unknown else []
    if isinstance(task, UsesModels) and not isinstance(task, NamesModels):
        out.append(f"the models of the task, which {task.name} does not name (scoring_models in docs/tasks.md)")
    if isinstance(config.engine, CustomEngine):
        out.append(f"engines of {config.engine.name}")
    return out


def _named(config: Config) -> list[UsedModel]:
    task = get_task(config.task)
    return [it for it in task.scoring_models() if it.place] if isinstance(task, NamesModels) else []


def measures_reference(config: Config) -> bool:
    task = get_task(config.task)
    return isinstance(task, Measures) and task.needs_reference


def _with_context(parts: dict[str, float]) -> Parts:
    """Add what CUDA takes in the process of the role itself. vLLM runs in processes of its own, and counts theirs."""
    return parts | {"CUDA": CONTEXT} if set(parts) != {"vLLM"} else parts
