"""Estimate the memory that a trainer needs, from the settings and, if it is known, the size of the policy."""

import math

from flows.planning.model_sizes import Model, find_policy
from tba.batches.output_pieces import KEPT_BYTES, ON_CPU, ON_GPU, Pieces
from tba.config import Config
from tba.runtime import compute_dtype

BYTES = {"float32": 4, "bfloat16": 2}
_KEPT = {"whole": (14, 4), "lowered": (10.6, 2)}
"""How many numbers a layer keeps per token for the backward pass, as a multiple of the hidden size and a multiple of
the intermediate size; the two are added. `whole`: the layer computes in the type of its weights. `lowered`: its weights
are float32 and it computes in bfloat16. The values were counted on Llama and Qwen2."""


def describe(config: Config) -> str:
    """Describe the memory that each rank of the trainer needs."""
    model = find_policy(config)
    ranks, parts, hosted = config.training.ranks, held(config, model), on_host(config)
    each, on = sum(parts.values()), f" on each of {ranks} ranks" if ranks > 1 else ""
    on += " if all are on one machine" if ranks > 1 and config.training.copy_per == "node" else ""
    on += ", beside adapters with their gradients and moments" if config.model.lora_rank else ""
    formula = f"{' + '.join(f'{name} {size:.3g}' for name, size in parts.items())} = {each:.4g} bytes a parameter"
    if model is None:
        size = f"{in_words(each * 1e9 / ranks)} for each billion of them{on}"
        hosts = [f"in main memory AdamW {hosted} bytes a parameter"] if hosted else []
        return "; ".join([f"{formula}: {size}, and activations", *_copies(config, 10**9, " for each billion"), *hosts])
    tokens, which = most_tokens(config)
    hosts = [f"in main memory AdamW {hosted} bytes a parameter: {in_words(hosted * model.parameters)}"]
    return "; ".join(
        [
            f"{formula}: {in_words(each * model.parameters / ranks)} for {model.parameters:,}{on}",
            *([f"{in_words(whole_at_once(config, model))} whole at a time"] if ranks > 1 else []),
            f"activations {in_words(activations(config, model, 1))} a token, "
            f"{in_words(activations(config, model, tokens))} for {which}",
            f"output layer {in_words(output_layer(config, model, tokens))}",
            *_copies(config, model.parameters),
            *(hosts if hosted else []),
        ]
    )


def whole_at_once(config: Config, model: Model) -> int:
    """Return the bytes that each of several ranks gathers while it computes: the whole weights and gradients of one
    block and of the parameters outside blocks, and the weights of the next block, which is gathered in advance.
    Weights below adapters have no gradients."""
    gathered = model.outside + 2 * model.block + (0 if config.model.lora_rank else model.outside + model.block)
    return gathered * (2 if lowers(config, model) else BYTES[config.model.dtype])


def activations(config: Config, model: Model, tokens: int) -> int:
    """Return the bytes of activations of this many tokens: those that are kept for the backward pass, and those of a
    layer that is computed again."""
    return kept_activations(config, model, tokens) + recomputed_activations(config, model, tokens)


def kept_activations(config: Config, model: Model, tokens: int) -> int:
    """Return the bytes of activations that are kept for the backward pass of this many tokens."""
    if config.training.checkpoint_activations:
        return tokens * model.layers * BYTES[config.model.dtype] * model.hidden  # the input of each layer
    return tokens * model.layers * _layer(config, model)


def recomputed_activations(config: Config, model: Model, tokens: int) -> int:
    """Return the bytes of activations of a layer that is computed again in the backward pass."""
    return tokens * _layer(config, model) if config.training.checkpoint_activations else 0


def output_layer(config: Config, model: Model, tokens: int) -> int:
    """Return the bytes that the output layer takes in the backward pass of so many predicted tokens: logits that are
    kept or computed again, their gradients, and the gradient of its weights before it is added to that of the step."""
    number = product_bytes(config, model)
    size = min(KEPT_BYTES, tokens * model.vocabulary * number)
    size += pieces_of(config).backward_bytes(tokens, model.vocabulary, number=number)
    if config.model.lora_rank:
        return size
    sums, products = 4, number if number < 4 else 0  # the sums in float32, and a product that is added to them
    return size + model.vocabulary * model.hidden * (sums + products)


def pieces_of(config: Config) -> Pieces:
    return ON_CPU if config.model.device == "cpu" else ON_GPU


def product_bytes(config: Config, model: Model) -> int:
    """Return the bytes of a number in matrix products."""
    return 2 if lowers(config, model) else BYTES[config.model.dtype]


def _layer(config: Config, model: Model) -> int:
    size, (hidden, intermediate) = BYTES[config.model.dtype], _KEPT["lowered" if lowers(config, model) else "whole"]
    return int(size * (hidden * model.hidden + intermediate * model.intermediate))


def held(config: Config, model: Model | None = None) -> dict[str, float]:
    """Return, by purpose, the bytes that the trainer holds per parameter of the policy. `model` is None if its size is
    unknown."""
    size, objective = BYTES[config.model.dtype], config.objective
    if config.model.lora_rank:  # the adapters are much smaller than the base, and are not counted
        parts: dict[str, float] = {"weights": size}
        if config.training.ranks > 1:  # ranks do not share the base with other models
            if objective.reference_reset:
                parts["moving reference"] = size
            if learns_values(config):
                parts["value model"] = size
    else:
        moments = moments_of(config) if not on_host(config) else 0
        parts = {"weights": size, "gradients": size, **({"AdamW": moments} if moments else {})}
        if objective.reference_reset or objective.reference_decay:
            parts["moving reference"] = size
        if learns_values(config):
            parts["value model"] = 2 * size + moments
    if lowers(config, model) and config.training.ranks == 1:
        parts["in bfloat16"] = 2
    return parts


def copied(config: Config) -> tuple[float, float]:
    """Return the bytes per parameter of a copy that is stored in the background: of a version, and of a version with
    its checkpoint. There are at most two such copies at a time; the second only if the store is slow."""
    weights, objective = BYTES[config.model.dtype], config.objective
    if config.model.lora_rank:
        return 0, 0
    more = moments_of(config)
    if objective.reference_reset or objective.reference_decay:
        more += weights
    if learns_values(config):
        more += weights + moments_of(config)
    return weights, weights + more


def _copies(config: Config, parameters: int, per: str = "") -> list[str]:
    if config.model.lora_rank:
        return []
    version, checkpoint = (in_words(size * parameters) + per for size in copied(config))
    return [f"copies in main memory {version} while a version is stored, {checkpoint} with a checkpoint"]


def moments_of(config: Config) -> float:
    """Return the bytes of optimizer state per parameter. For moments of 8 bits, this assumes that the length of each
    row of a weight matrix is a multiple of 256, and ignores small tensors, whose moments keep full precision."""
    if config.training.optimizer == "adamw-8bit":
        return 2 * (1 + 4 / 256)
    return 2 * BYTES[config.model.dtype]


def on_host(config: Config) -> float:
    """Return the bytes of optimizer state per parameter that are in main memory and not on GPUs, summed over all
    ranks."""
    if config.training.optimizer != "adamw-on-host" or config.model.device == "cpu" or config.model.lora_rank:
        return 0
    return moments_of(config) * (2 if learns_values(config) else 1)


def learns_values(config: Config) -> bool:
    """True if a value model is trained together with the policy."""
    auxiliary = config.objective.auxiliary
    return auxiliary is not None and auxiliary.kind == "value"


def most_tokens(config: Config) -> tuple[int, str]:
    """Return the maximum number of tokens in a micro-batch, and a description of these tokens. A micro-batch never has
    more groups than a step gives to a rank, and always room for a whole response."""
    training = config.training
    group = config.search.max_prompt_tokens + training.responses_per_prompt * config.search.max_response_tokens
    in_step = math.ceil(training.prompts_per_step / training.ranks)
    if (budget := training.tokens_per_micro_batch) and max(budget, config.longest) < in_step * group:
        if budget < config.longest:
            return config.longest, f"a longest response and its prompt of {config.longest:,} tokens"
        return budget, f"{budget:,} tokens at once"
    groups = min(training.most_groups or in_step, in_step)
    return groups * group, f"{groups} groups of {group:,} tokens at full length"


def lowers(config: Config, model: Model | None) -> bool:
    """Return True if matrices are multiplied in bfloat16 although the weights are in float32. Unless `model.device` is
    `cpu`, a GPU is assumed."""
    device = "cpu" if config.model.device == "cpu" else "cuda"
    unknown = compute_dtype.LEAST_PARAMETERS if config.model.path else 0  # a model that cannot be found is not tiny
    parameters = model.parameters if model else unknown
    chosen = compute_dtype.choose(config.training.compute_dtype, device=device, parameters=parameters)
    return config.model.dtype == "float32" and chosen.name == "bfloat16"


def in_words(size: float) -> str:
    unit, scale = ("GB", 1e9) if size >= 1e8 else ("MB", 1e6) if size >= 1e5 else ("kB", 1e3)
    return f"{size / scale:,.3g} {unit}"
