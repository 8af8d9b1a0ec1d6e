"""Make the prompts of a run with its task, check them, choose among them, and store them before generation starts."""

import json
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from storage.log.prompts import has_prompts, read_prompts, write_prompts
from storage.objects.datasets import read_rows
from storage.queries.difficulty import ask
from storage.runs.events import Events
from storage.runs.run import Run
from tba.config import Config
from tba.errors import ConfigError, DataError
from tba.interfaces import ReadsFields, Task
from tba.search.prompt_stream import PromptStream
from tba.tasks.guard import asking
from tba.types import Prompt


def store_prompts(run: Run, config: Config, task: Task, tokenizer: Any, events: Events) -> None:
    train = _make_prompts(task, "train", config.task.train, config, tokenizer, events)
    test = _make_prompts(task, "test", config.task.test, config, tokenizer, events)
    known = {prompt.prompt_id for prompt in train}
    if twice := next((it.prompt_id for it in test if it.prompt_id in known), None):
        raise DataError(
            f"task {task.name!r}: prompt_id {twice!r} is in both splits, train and test: it must be in only one of them"
        )
    if config.search.prompts_from:
        train = _chosen(run, config, train, events)
    check_fill(config, train)
    write_prompts(run, "train", train)
    write_prompts(run, "test", test)


def check_fill(config: Config, prompts: Sequence[Prompt]) -> None:
    """Raise ConfigError if `search.rounds_per_version` lets searchers generate fewer trajectories than the first step
    waits for. A round asks each prompt at most once, so with few prompts a round has fewer responses than the settings
    say."""
    search = config.search
    if search.rounds_per_version is None:
        return
    streams = [stream_of_prompts(config, prompts, searcher) for searcher in range(search.searchers)]
    rounds = [it.take(n, search.prompts_per_round) for it in streams for n in range(search.rounds_per_version)]
    if (most := sum(map(len, rounds)) * search.responses_per_prompt) < search.initial_fill:
        raise ConfigError(
            f"search.rounds_per_version: with {len(prompts)} prompts, {search.rounds_per_version} round(s) of each "
            f"searcher have only {most} responses, but the first step waits for {search.initial_fill} "
            "(search.initial_fill)"
        )


def stream_of_prompts(config: Config, prompts: Sequence[Prompt], searcher: int) -> PromptStream:
    search = config.search
    # Searchers that join a run which was configured with none do not divide the prompts among themselves.
    together = max(1, search.searchers)
    return PromptStream(prompts, seed=config.seed, searcher=searcher, searchers=together, shuffle=search.shuffle)


def _make_prompts(
    task: Task, split: str, source: str, config: Config, tokenizer: Any, events: Events
) -> Sequence[Prompt]:
    """Make the prompts of a split from the rows at `source`. If `source` is empty, use the rows at the task's own
    source."""
    with asking(task, "source"):
        source = source or task.source(split)
    rows = read_rows(source, fields=task.fields if isinstance(task, ReadsFields) else None) if source else []
    limit = config.search.max_prompt_tokens
    prompts = _prompts_of(task, split, rows, tokenizer, limit)
    if (left_out := len(rows) - len(prompts)) > 0:  # a task may also make several prompts of a row
        message = (
            f"{left_out} of {len(rows)} rows of split {split!r} made no prompt: they have more than {limit} tokens "
            "(search.max_prompt_tokens), or the task has a reason of its own"
        )
        events.write("prompts-left-out", message, severity="warning", split=split, left_out=left_out)
    return prompts


def _prompts_of(task: Task, split: str, rows: Sequence[Mapping[str, Any]], tokenizer: Any, limit: int) -> list[Prompt]:
    """Return the prompts that the task makes, checked. The task may be the user's own code, so malformed prompts are
    refused here and not later in a searcher."""
    with asking(task, "prompts"):
        prompts = list(task.prompts(split, rows, tokenizer, max_tokens=limit))
    if not prompts:
        lacks = not rows and isinstance(task, ReadsFields)
        unread = f"; it got no rows: set task.{split} to a file or dataset with rows" if lacks else ""
        raise DataError(
            f"task {task.name!r} makes no prompt of split {split!r} with at most {limit} tokens "
            f"(search.max_prompt_tokens){unread}"
        )
    for prompt in prompts:
        if fault := _fault_of(prompt, limit):
            raise DataError(f"task {task.name!r}: {fault}")
    return prompts


def _fault_of(prompt: Any, limit: int) -> str:
    """Return why a prompt cannot be used, or an empty string if it can."""
    if not isinstance(prompt, Prompt):
        return f"a prompt must be a tba.types.Prompt, got {prompt!r:.80}"
    named = f"prompt {prompt.prompt_id!r}"
    for field in ("prompt_id", "text", "answer"):
        if not isinstance(value := getattr(prompt, field), str):
            return f"{named}: {field} must be text, got {value!r:.80}"
    if not 1 <= len(prompt.tokens) <= limit:
        return f"{named} must have 1 to {limit} tokens (search.max_prompt_tokens), got {len(prompt.tokens)}"
    if strange := [token for token in prompt.tokens if not isinstance(token, Integral)]:
        return f"{named}: tokens must be whole numbers, got {strange[0]!r:.80}"
    try:
        json.dumps(dict(prompt.metadata), allow_nan=False)
    except (TypeError, ValueError) as error:
        return f"{named}: metadata must be JSON: {error}"
    return ""


def _chosen(run: Run, config: Config, prompts: Sequence[Prompt], events: Events) -> list[Prompt]:
    """Return the prompts for which `search.prompts_where` holds in the earlier run. The earlier run is asked only once:
    if this run starts again, it keeps its stored prompts, even if the earlier run has changed."""
    search = config.search
    if has_prompts(run, "train"):
        stored = {prompt.prompt_id for prompt in read_prompts(run, "train")}
        return [prompt for prompt in prompts if prompt.prompt_id in stored]
    known = ask(search.prompts_from, search.prompts_where, needed=search.prompts_per_round)
    chosen, message = known.choose(prompts), known.tell(prompts)
    if len(chosen) < search.prompts_per_round:
        raise ConfigError(f"{message}; a round asks {search.prompts_per_round} (search.prompts_per_round)")
    unknown = known.unknown(prompts)
    events.write("prompts-chosen", message, chosen=len(chosen), of=len(prompts), unknown=unknown)
    return chosen
