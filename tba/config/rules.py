"""Rules that tie settings of several sections to each other."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tba.config.engine import VLLMEngine
from tba.config.search import SearchConfig

if TYPE_CHECKING:
    from tba.config.config import Config

Rule = tuple[bool, str]
"""Whether the settings follow a rule, and the error message if they do not."""


def rules(config: "Config") -> Iterator[Rule]:
    for topic in (_amounts, _lockstep, _micro_batches, _shifts, _schedules, _weights, _engine, _values, _deadlines):
        yield from topic(config)


def _amounts(config: "Config") -> Iterator[Rule]:
    """Yield the rules about the numbers of responses, prompts and steps."""
    search, training, sync = config.search, config.training, config.sync
    to_take = training.steps - config.start.step
    yield (
        search.responses_per_prompt >= training.responses_per_prompt,
        f"search.responses_per_prompt (S) must be >= training.responses_per_prompt (K = "
        f"{training.responses_per_prompt}), got {search.responses_per_prompt}",
    )
    yield (
        to_take > 0,
        f"training.steps must be > start.step ({config.start.step}), the step that a fork starts from, got "
        f"{training.steps}",
    )
    yield (
        sync.every <= to_take,
        f"sync.every must be <= training.steps - start.step ({to_take}), got {sync.every}",
    )
    yield (
        config.sampling.capacity >= training.responses_per_prompt,
        f"sampling.capacity must be >= training.responses_per_prompt (K = "
        f"{training.responses_per_prompt}), got {config.sampling.capacity}",
    )
    yield (
        sync.lag is not None or search.initial_fill >= config.batch,
        f"search.initial_fill must be >= training.prompts_per_step x training.responses_per_prompt "
        f"({config.batch}), or the first batch would repeat trajectories, got {search.initial_fill}",
    )
    yield (
        search.rounds_per_version is None or config.most_at_first >= search.initial_fill,
        f"search.rounds_per_version x search.searchers x search.prompts_per_round x "
        f"search.responses_per_prompt must be >= search.initial_fill ({search.initial_fill}), or the first "
        f"step would never come, got {config.most_at_first}",
    )


def _lockstep(config: "Config") -> Iterator[Rule]:
    """Yield the rules for searchers that go in step with the trainer (`sync.lag`), for overlapping rounds, and for
    bounded age."""
    search, training, sync = config.search, config.training, config.sync
    recent = training.prompts_per_step * sync.every * config.sampling.recent_share
    yield (
        sync.lag is None or config.engine.in_flight == "finish",
        f"engine.in_flight must be 'finish' where sync.lag is set ({sync.lag}), because the lag decides which "
        f"version generates a round, got {config.engine.in_flight!r}",
    )
    yield (
        search.open_rounds == 1 or sync.lag is None,
        f"search.open_rounds must be 1 where sync.lag is set ({sync.lag}), because the lag decides which version "
        f"generates a round, got {search.open_rounds}",
    )
    yield (
        search.open_rounds == 1 or not search.value_samples,
        f"search.open_rounds must be 1 where search.value_samples is set ({search.value_samples}), because the "
        f"values of a round are estimated before the next round begins, got {search.open_rounds}",
    )
    yield (
        search.rounds_per_version is None or sync.lag is None,
        f"search.rounds_per_version does not apply where sync.lag is set ({sync.lag}), because the lag decides "
        f"which version generates a round, got {search.rounds_per_version}",
    )
    yield (
        sync.lag is None or config.prompts_in_step >= recent,
        f"search.searchers x search.prompts_per_round must be >= training.prompts_per_step x sync.every x "
        f"sampling.recent_share ({recent:g}) where sync.lag is set, or steps would repeat the prompts of a round, got "
        f"{config.prompts_in_step}",
    )
    yield (
        sync.lag is None or sync.keep_versions >= sync.lag + 2,
        f"sync.keep_versions must be >= sync.lag + 2, got {sync.keep_versions} with lag {sync.lag}",
    )
    yield (
        config.sampling.max_age is None or config.sampling.max_age >= config.recent_ages[1],
        f"sampling.max_age must be >= {config.recent_ages[1]}, the age that responses of the newest version reach "
        f"before the next sync (sync.every = {sync.every}"
        f"{'' if sync.lag is None else f', sync.lag = {sync.lag}'}), or steps would have nothing to draw, got "
        f"{config.sampling.max_age}",
    )


def _micro_batches(config: "Config") -> Iterator[Rule]:
    """Yield the rules about how a batch is divided into micro-batches and among ranks."""
    training = config.training
    yield (
        (training.groups_per_micro_batch or 1) <= training.prompts_per_step,
        f"training.groups_per_micro_batch must be <= training.prompts_per_step "
        f"({training.prompts_per_step}), got {training.groups_per_micro_batch}",
    )
    yield (
        training.ranks <= training.prompts_per_step,
        f"training.ranks must be <= training.prompts_per_step ({training.prompts_per_step}), or some ranks "
        f"would have nothing to learn from, got {training.ranks}",
    )


def _shifts(config: "Config") -> Iterator[Rule]:
    """Yield the rules for roles that use one GPU one after the other."""
    for name, value in {"training.ranks": config.training.ranks, "engine.tensor_parallel": config.engine.gpus}.items():
        yield (
            not config.model.gpu_shifts or value == 1,
            f"{name} must be 1 where model.gpu_shifts is set, because each role then uses a single GPU, got {value}",
        )


def _schedules(config: "Config") -> Iterator[Rule]:
    """Yield the rules about the schedule of the learning rate."""
    training = config.training
    schedule_ends = training.warmup_steps + training.peak_steps + training.decay_steps
    yield (
        training.schedule != "warmup-stable-decay" or schedule_ends >= training.steps,
        f"training.steps must be <= {schedule_ends}, where training.schedule 'warmup-stable-decay' ends (warmup_steps "
        f"{training.warmup_steps} + stable_steps {training.peak_steps} + decay_steps {training.decay_steps}), or the "
        f"learning rate would be 0 in the steps after it, got {training.steps}; raise training.stable_steps, or unset "
        "it to let it fill the remaining steps",
    )


def _weights(config: "Config") -> Iterator[Rule]:
    """Yield the rules about adapters and a moving reference."""
    sync, objective = config.sync, config.objective
    yield (
        not objective.reference_decay or config.model.dtype == "float32",
        f"model.dtype must be 'float32' where objective.reference_decay is set ({objective.reference_decay:g}), or "
        f"rounding would lose small moves of the reference, got {config.model.dtype!r}",
    )
    yield (
        not (config.model.lora_rank and objective.reference_decay),
        f"objective.reference_decay must be 0 where model.lora_rank is set, because the mean of two products is not "
        f"the product of the mean factors, got {objective.reference_decay:g}",
    )
    yield (
        not config.model.lora_rank or sync.whole_every == 1,
        f"sync.whole_every must be 1 where model.lora_rank is set, because adapters are small and differ in most "
        f"bits, got {sync.whole_every}",
    )


def _engine(config: "Config") -> Iterator[Rule]:
    """Yield the rules about the engine's number format."""
    quantization = config.engine.quantization if isinstance(config.engine, VLLMEngine) else None
    yield (
        quantization is None or config.model.publish_dtype == "bfloat16",
        f"model.publish_dtype must be 'bfloat16' where engine.quantization is {quantization!r}, because vLLM rounds "
        f"only 16-bit weights to 8 bits, got {config.model.publish_dtype!r}",
    )


def _values(config: "Config") -> Iterator[Rule]:
    """Yield the rules about Monte-Carlo values of the states within responses."""
    search, objective = config.search, config.objective
    yield (
        search.value_samples > 0 or not objective.needs_values,
        f"search.value_samples must be > 0 for objective.name {objective.name!r}, got 0",
    )
    yield (
        search.value_samples > 0 or search.value_steps == SearchConfig.value_steps,
        f"search.value_steps does not apply where search.value_samples is 0, got {search.value_steps}",
    )


def _deadlines(config: "Config") -> Iterator[Rule]:
    """Yield the rules about leases."""
    yield (
        config.limits.silent_after >= 3 * config.limits.lease_every,
        f"limits.silent_after must be >= 3 x limits.lease_every ({config.limits.lease_every}), "
        f"got {config.limits.silent_after}",
    )
    yield (
        config.limits.orphan_after >= 3 * config.limits.lease_every,
        f"limits.orphan_after must be >= 3 x limits.lease_every ({config.limits.lease_every}), or every role "
        f"would take itself for an orphan, got {config.limits.orphan_after}",
    )
