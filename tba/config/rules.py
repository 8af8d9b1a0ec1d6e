"""Rules that tie settings of several sections to each other."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tba.config.search import SearchConfig

if TYPE_CHECKING:
    from tba.config.config import Config

Rule = tuple[bool, str]
"""Whether the settings keep a rule, and the error if they do not."""


def rules(config: "Config") -> Iterator[Rule]:
    for topic in (_amounts, _lockstep, _micro_batches, _schedules, _weights, _values, _deadlines):
        yield from topic(config)


def _amounts(config: "Config") -> Iterator[Rule]:
    """Yield the rules about how much is generated, drawn and stepped on."""
    search, training, sync = config.search, config.training, config.sync
    to_take = training.steps - config.start.step
    yield (
        search.responses_per_prompt >= training.responses_per_prompt,
        f"search.responses_per_prompt (S) must be >= training.responses_per_prompt (K = "
        f"{training.responses_per_prompt}), got {search.responses_per_prompt}",
    )
    yield (
        to_take > 0,
        f"training.steps must be > start.step ({config.start.step}), after which a fork goes on, got {training.steps}",
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
        f"({config.batch}), or the first batch repeats trajectories, got {search.initial_fill}",
    )
    yield (
        search.rounds_per_version is None or config.most_at_first >= search.initial_fill,
        f"search.rounds_per_version x search.searchers x search.prompts_per_round x "
        f"search.responses_per_prompt must be >= search.initial_fill ({search.initial_fill}), or the first "
        f"step never comes, got {config.most_at_first}",
    )


def _lockstep(config: "Config") -> Iterator[Rule]:
    """Yield the rules for searchers and trainer that go in step, and for rounds that overlap."""
    search, training, sync = config.search, config.training, config.sync
    yield (
        sync.lag is None or config.engine.in_flight == "finish",
        f"engine.in_flight must be 'finish' where sync.lag is set ({sync.lag}), which says by which version a "
        f"round is, got {config.engine.in_flight!r}",
    )
    yield (
        search.open_rounds == 1 or sync.lag is None,
        f"search.open_rounds must be 1 where sync.lag is set ({sync.lag}), which says by which version a round "
        f"is, got {search.open_rounds}",
    )
    yield (
        search.open_rounds == 1 or not search.value_samples,
        f"search.open_rounds must be 1 where search.value_samples is set ({search.value_samples}): a round's "
        f"values are estimated before the next begins, got {search.open_rounds}",
    )
    yield (
        search.rounds_per_version is None or sync.lag is None,
        f"search.rounds_per_version does not apply where sync.lag is set ({sync.lag}), which says by which "
        f"version a round is, got {search.rounds_per_version}",
    )
    yield (
        sync.lag is None or config.prompts_in_step >= training.prompts_per_step * sync.every,
        f"search.searchers x search.prompts_per_round must be >= training.prompts_per_step x sync.every "
        f"({training.prompts_per_step * sync.every}) where sync.lag is set, or steps repeat the prompts of a "
        f"round, got {config.prompts_in_step}",
    )
    yield (
        sync.lag is None or sync.keep_versions >= sync.lag + 2,
        f"sync.keep_versions must be >= sync.lag + 2, got {sync.keep_versions} with lag {sync.lag}",
    )
    yield (
        config.sampling.max_age is None or config.sampling.max_age >= config.recent_ages[1],
        f"sampling.max_age must be >= {config.recent_ages[1]}, the age that what the newest version generates "
        f"has come to before the next sync (sync.every = {sync.every}"
        f"{'' if sync.lag is None else f', sync.lag = {sync.lag}'}), or steps would have nothing to draw, got "
        f"{config.sampling.max_age}",
    )


def _micro_batches(config: "Config") -> Iterator[Rule]:
    """Yield the rules about how a batch is divided."""
    training, objective = config.training, config.objective
    yield (
        (training.groups_per_micro_batch or 1) <= training.prompts_per_step,
        f"training.groups_per_micro_batch must be <= training.prompts_per_step "
        f"({training.prompts_per_step}), got {training.groups_per_micro_batch}",
    )
    yield (
        training.ranks <= training.prompts_per_step,
        f"training.ranks must be <= training.prompts_per_step ({training.prompts_per_step}), or some would "
        f"have nothing to learn from, got {training.ranks}",
    )
    single_process = {
        "objective.name": (not objective.needs_whole_batch, objective.name),
        "objective.log_z": (not (objective.auxiliary and objective.auxiliary.kind == "log_z"), "learned"),
        "model.lora_rank": (not config.model.lora_rank, config.model.lora_rank),
    }
    for name, (holds, found) in single_process.items():
        yield (
            training.ranks == 1 or holds,
            f"training.ranks must be 1 where {name} is {found!r}, got {training.ranks}",
        )


def _schedules(config: "Config") -> Iterator[Rule]:
    """Yield the rules about what changes from step to step."""
    training = config.training
    schedule_ends = training.warmup_steps + training.peak_steps + training.decay_steps
    yield (
        training.schedule != "warmup-stable-decay" or schedule_ends >= training.steps,
        f"training.schedule: 'warmup-stable-decay' ends at step {schedule_ends} (warmup_steps "
        f"{training.warmup_steps} + stable_steps {training.peak_steps} + decay_steps {training.decay_steps}), "
        f"from where to training.steps, got {training.steps}, the learning rate would be 0; raise "
        "training.stable_steps, or leave it unset: it then takes what the others leave",
    )


def _weights(config: "Config") -> Iterator[Rule]:
    """Yield the rules about adapters and a moving reference."""
    sync, objective = config.sync, config.objective
    yield (
        not objective.reference_decay or config.model.dtype == "float32",
        f"objective.reference_decay needs model.dtype 'float32', got {config.model.dtype!r}, in which small "
        "moves of the reference round to none",
    )
    yield (
        not (config.model.lora_rank and objective.reference_decay),
        f"objective.reference_decay must be 0 where model.lora_rank is set: what adapters add is a product, of "
        f"which no mean of theirs is the mean, got {objective.reference_decay:g}",
    )
    yield (
        not config.model.lora_rank or sync.whole_every == 1,
        f"sync.whole_every must be 1 where model.lora_rank is set: adapters are small, and differ in most "
        f"bits, got {sync.whole_every}",
    )


def _values(config: "Config") -> Iterator[Rule]:
    """Yield the rules about values of the states within responses."""
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
    """Yield the rules about signs of life."""
    yield (
        config.limits.silent_after >= 3 * config.limits.lease_every,
        f"limits.silent_after must be >= 3 x limits.lease_every ({config.limits.lease_every}), "
        f"got {config.limits.silent_after}",
    )
    yield (
        config.limits.orphan_after >= 3 * config.limits.lease_every,
        f"limits.orphan_after must be >= 3 x limits.lease_every ({config.limits.lease_every}), or every role "
        f"takes itself for an orphan, got {config.limits.orphan_after}",
    )
