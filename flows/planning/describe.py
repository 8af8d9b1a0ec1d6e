"""Describe in words what the settings of a run mean, for `tba run --dry-run`."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from flows.planning import trainer_memory
from flows.planning.memory_plan import Gpus
from flows.planning.model_sizes import find_policy
from flows.planning.plan_table import table
from flows.planning.resolve import ask_earlier_run
from flows.roles.engines import lacks_adapter_kernels
from storage.queries.difficulty import Known
from tba.config import Config, OptimizerName, TrainingConfig, VLLMEngine
from tba.interfaces import TakesTurns
from tba.tasks.registry import get_task
from tba.train.schedules import learning_rate_at

_TOKENS_PER_SECOND = 1000  # the speed of one searcher that --dry-run assumes; `tba watch` shows the real speed

_BYTES_PER_SECOND = 1e9  # the speed of the disk that --dry-run assumes

_NO_REFERENCE = "searchers do not compute its log-probabilities, which the objective does not need"


def describe(config: Config, gpus: Gpus | None = None) -> str:
    """Return a table with one line per subject, in the words and with the formulas of the documentation. With `gpus`,
    also say what each role takes of their memory."""
    training, search, sync = config.training, config.search, config.sync
    known = ask_earlier_run(config)
    rows = [
        ("task", config.task.name),
        *([("prompts", _prompts(known))] if known else []),
        ("policy", config.model.path or "made by the task"),
        *([("adapters", _adapters(config))] if config.model.lora_rank else []),
        *([("options", _assignments(config.task.options))] if config.task.options else []),
        ("objective", _objective(config)),
        ("learning rate", _learning_rate(config)),
        ("batch", f"{training.prompts_per_step} prompts x {training.responses_per_prompt} responses = {config.batch}"),
        ("micro-batches", _micro_batches(training)),
        ("memory", trainer_memory.describe(config)),
        *((f"on {gpus}", line) for line in _on_gpus(config, gpus)),
        ("steps", f"{training.steps}, {config.batch * training.steps:,} responses drawn in all"),
        ("syncs", f"every {sync.every} steps, {config.last_sync} in all; a checkpoint every {sync.checkpoint_every}"),
        ("ages", _ages(config)),
        *([("bounds", _bounds(*bounds))] if (bounds := config.sampling.mean_reward_between) else []),
        ("round", _round(config)),
        *([("values", _values(config))] if search.value_samples else []),
        *([("reference", _NO_REFERENCE)] if not config.stores_reference_logps else []),
        *([("initial fill", f"{search.initial_fill} trajectories")] if sync.lag is None else []),
        ("evaluation", _evaluation(config)),
        ("storage", _storage(config)),
        (
            "replay buffer",
            f"keeps up to {config.limits.memory_gb:g} GB of trajectories in the trainer's memory and, for remote runs, "
            f"up to {config.limits.disk_gb:g} GB on its disk",
        ),
        *(("note", note) for note in _notes(config, known)),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def _on_gpus(config: Config, gpus: Gpus | None) -> Iterator[str]:
    if gpus and (model := find_policy(config)):
        yield from table(config, model, gpus)


def _prompts(known: Known) -> str:
    return f"{len(known.chosen):,} of the {len(known.prompts):,} prompts of {known.url}: where {known.where}"


def _round(config: Config) -> str:
    search = config.search
    if not search.searchers:
        return "none, as there are no searchers (search.searchers): the run trains on what `tba import` brings"
    more = f", which works on {search.open_rounds} rounds at once" if search.open_rounds > 1 else ""
    return (
        f"{search.prompts_per_round} prompts x {search.responses_per_prompt} responses = {config.responses_per_round}, "
        f"by each of {search.searchers} searcher(s){more}"
    )


def _micro_batches(training: TrainingConfig) -> str:
    again = "; layers are computed again in the backward pass" if training.checkpoint_activations else ""
    if (groups := training.most_groups) is not None:
        return f"{math.ceil(training.prompts_per_step / groups)} of at most {groups} groups, never split{again}"
    return (
        f"whole groups with at most {training.tokens_per_micro_batch:,} tokens in all; a larger group is read in "
        f"pieces, twice{again}"
    )


def _ages(config: Config) -> str:
    """Describe the ages of recent draws, and from which step and under which condition they hold."""
    sync, start, share = config.sync, config.start, config.sampling.recent_share
    low, high, mean = config.recent_ages
    old = f"{low} to {high} steps old (mean {mean:g})"
    if low == high:
        old = f"{low} step{'s' * (low != 1)} old" if low else "on policy"
    first = start.step + sync.every * (1 if sync.lag is None else sync.lag)
    if config.training.steps <= first:
        old += f", as version {start.sync} generates for every step"
    else:
        old += f" from step {first + 1} on" if first > start.step else ""
        if sync.lag is None:
            old += f" if searchers adopt versions at once, up to {sync.every} steps older if they do so a round later"
        else:
            apart = f", {sync.lag} sync{'s' * (sync.lag != 1)} apart" if sync.lag else ""
            old += f" as searchers and trainer go in step{apart}"
    bound = config.sampling.max_age
    rest = "any age" if bound is None else f"at most {bound} steps (sampling.max_age)"
    return f"{share:.0%} of draws are recent, {old}" + (f"; the others are of {rest}" if share < 1 else "")


def _notes(config: Config, known: Known | None) -> Iterator[str]:
    """Yield a note for each combination of settings that is allowed but probably a mistake."""
    search, training, sampling = config.search, config.training, config.sampling
    if config.sync.lag is not None and sampling.recent_share == 1 and not sampling.mean_reward_between:
        # Unless sampling.copies is "all", only different responses are drawn, so more than K per prompt are useful.
        each = training.responses_per_prompt if sampling.copies == "all" else search.responses_per_prompt
        generated = config.prompts_in_step * search.responses_per_prompt
        used = config.sync.every * training.prompts_per_step * each
        if used < generated:
            yield (
                f"{generated - used:,} of the {generated:,} responses of a round are generated for nothing: the steps "
                f"between two syncs (sync.every={config.sync.every}) draw only from the newest round "
                f"(sampling.recent_share=1), and use at most {used:,} of its responses"
            )
    late = config.recent_ages[1] + config.sync.every
    if sampling.max_age is not None and config.sync.lag is None and sampling.max_age < late:
        yield (
            f"if a round ends one sync late, its responses reach an age of {late} steps, but sampling.max_age="
            f"{sampling.max_age} drops them before that: the trainer then waits for younger responses"
        )
    budget, longest = training.tokens_per_micro_batch, search.max_prompt_tokens + search.max_response_tokens
    if budget is not None and budget < longest:
        yield (
            f"a response of full length and its prompt have {longest:,} tokens and are always read at once, although "
            f"that is more than training.tokens_per_micro_batch={budget}"
        )
    yield from _slow_stop(config)
    if isinstance(config.engine, VLLMEngine) and lacks_adapter_kernels(config):
        yield (
            "on a GPU responses come from transformers, which is slower: vLLM serves adapters there only in 16 bits, "
            "as with model.dtype=bfloat16 model.publish_dtype=bfloat16"
        )
    if known and len(known.chosen) < training.prompts_per_step:
        yield (
            f"a step draws {training.prompts_per_step} prompts, but there are only {len(known.chosen)}: it draws some "
            "of them repeatedly"
        )


def _slow_stop(config: Config) -> Iterator[str]:
    """Yield a note if storing the last checkpoint alone may take longer than `limits.stop_grace`."""
    model = find_policy(config)
    size = trainer_memory.copied(config)[1] * model.parameters if model else 0
    if (seconds := size / _BYTES_PER_SECOND) > config.limits.stop_grace:
        yield (
            f"a checkpoint has {trainer_memory.in_words(size)}, so a stop in order takes {seconds:.0f} s or more on a "
            "disk that writes 1 GB a second: the trainer measures this and gets the time that it needs beyond "
            f"limits.stop_grace={config.limits.stop_grace:g}, and limits from outside, such as those of Prefect and "
            "Kubernetes, must leave it this time as well"
        )


def _bounds(low: float, high: float) -> str:
    return (
        f"draw only prompts whose responses in the buffer have a mean reward between {low:g} and {high:g}, if there "
        "are any"
    )


def _adapters(config: Config) -> str:
    model = config.model
    return (
        f"rank {model.lora_rank}, alpha {model.peft_alpha:g}, in {model.lora_targets}; the weights of the base model "
        "do not change"
    )


def _objective(config: Config) -> str:
    """Return the name of the objective, the course of beta, and all other settings that differ from their defaults."""
    objective = config.objective
    beta = f"{objective.beta_end:g}"
    if objective.beta_start != objective.beta_end:
        beta = f"{objective.beta_start:g} at step 1, {objective.beta_end:g} from step {objective.beta_stop} on"
    shown = {"name", "beta_start", "beta_end", "beta_target", "beta_stop"}
    others = {it.name: getattr(objective, it.name) for it in fields(objective) if it.name not in shown}
    changed = {name: value for name, value in others.items() if value != getattr(type(objective), name)}
    return ", ".join([objective.name, f"beta {beta}", *([_assignments(changed)] if changed else [])])


def _assignments(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


_OPTIMIZERS: dict[OptimizerName, str] = {
    "adamw": "AdamW",
    "adamw-fused": "AdamW, fused",
    "adamw-8bit": "AdamW in 8 bits",
    "adamw-on-host": "AdamW in main memory",
}


def _learning_rate(config: Config) -> str:
    training = config.training
    steps = [f"{training.warmup_steps} steps up"] if training.warmup_steps else []
    if training.schedule == "warmup-stable-decay":
        steps += [f"{training.peak_steps} at the peak", f"{training.decay_steps} down"]
    last = learning_rate_at(training.steps, training)
    how = f"{training.schedule} ({', '.join([*steps, f'{last:.3g} at the last step'])})"
    clipped = f", gradients clipped to a norm of {training.clip_norm:g}" if training.clip_norm else ""
    optimizer = _OPTIMIZERS[training.optimizer]
    return f"{training.learning_rate:g}, {how}; {optimizer}, moments {training.adam_beta1:g} and " + (
        f"{training.adam_beta2:g}{clipped}"
    )


def _values(config: Config) -> str:
    search = config.search
    states = f"at most {search.value_steps} of" if search.value_steps else "all"
    return (
        f"{search.value_samples} continuations from {states} the states of each response; a state is the prompt, or "
        "the response up to the end of a step"
    )


def _storage(config: Config) -> str:
    search, sync = config.search, config.sync
    per_hour = search.searchers * _TOKENS_PER_SECOND * 3600 / search.max_response_tokens
    steps, besides = "", ""
    if search.value_samples:
        steps, besides = ", and 8 more for each step of a response", ", less because continuations are not stored"
    elif isinstance(get_task(config.task), TakesTurns):
        besides = ", more because the environment's turns are stored too"
    if search.rounds_per_version:
        most = config.most_at_first * (config.last_sync - config.start.sync + 1) * config.bytes_per_trajectory / 1e9
        per_version = f"{search.rounds_per_version} round(s) per searcher and version"
        besides += f", in all at most about {most:.2g} GB with {per_version}"
    return (
        f"at most {config.bytes_per_trajectory:,} bytes per trajectory of full length{steps}; about "
        f"{per_hour * config.bytes_per_trajectory / 1e9:.2g} GB an hour at {_TOKENS_PER_SECOND} tokens a second "
        f"per searcher{besides}; {sync.keep_versions} versions and {sync.keep_checkpoints} checkpoints kept"
    )


def _evaluation(config: Config) -> str:
    evaluation = config.evaluation
    text = f"every {evaluation.every} syncs, at most {evaluation.prompts} prompts: greedy"
    if evaluation.samples:
        text += (
            f", and {evaluation.samples} sampled at temperature {config.evaluation_temperature:g}, "
            f"top-p {config.evaluation_top_p:g}"
        )
    return text + "".join(f", pass@{k}" for k in evaluation.pass_at)
