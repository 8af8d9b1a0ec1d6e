"""Environments of the library `verifiers` as a task: its prompts, its turns, its tools and its rewards.

An environment keeps a state while it is talked to; a task answers from the prompt and what was said alone. So each time
it is asked, the environment is gone through from its beginning, with a policy that says again what was said: by the
library's own loop, which ends where that policy has nothing left to say.
"""

import asyncio
import json
import math
import os
import re
import signal
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, wraps
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from inspect import isawaitable
from typing import Any, Literal, TypeVar

from pydantic import Field, JsonValue

from tba.config import Config, EvaluationConfig, SearchConfig, TaskConfig, TrainingConfig, parse_options, settings
from tba.errors import ConfigError, DataError, RunFailed
from tba.models import chat_template
from tba.runtime.loading import search_working_folder
from tba.tasks.verifiers_client import Again, Asked
from tba.types import Prompt, Response, Reward

T = TypeVar("T")
Row = Mapping[str, Any]
OTHERWISE = "does not say again what it said before, given the same answers"
_loading = threading.Lock()


@settings
class Options:
    environment: str
    """What the library's `load_environment` takes: a module with a function of this name, or the id of one."""
    arguments: dict[str, JsonValue] = Field(default_factory=dict)
    """What that function is given."""
    errors: Literal["raise", "zero"] = "raise"
    """What becomes of a response if the environment or a reward function fails: the role fails too, or, as the library
    has it, the function counts as 0."""


class Verifiers:
    """Takes turns with whatever policy; responses of one turn come from environments that do not answer."""

    name = "verifiers"

    def __init__(self, config: TaskConfig):
        for field in ("train", "test", "rule", "template"):
            if given := getattr(config, field):
                raise ConfigError(
                    f"task.{field}: an environment brings its own, so nothing can be chosen, got {given!r}"
                )
        self.options = parse_options(Options, config)
        _check_installed()
        _check_module(self.options.environment)

    @staticmethod
    def preset() -> Config:
        """For a small model of language."""
        return Config(
            search=SearchConfig(prompts_per_round=16, initial_fill=128),
            training=TrainingConfig(
                steps=200, groups_per_micro_batch=1, learning_rate=1e-5, warmup_steps=10, clip_norm=1.0
            ),
            evaluation=EvaluationConfig(prompts=200, samples=4),
        )

    def source(self, split: str) -> str:
        return ""

    def prompts(self, split: str, rows: Sequence[Row], tokenizer: Any, *, max_tokens: int) -> list[Prompt]:
        """What the environment asks first, of each row of its dataset. The row and what is asked go along as metadata:
        with them, the environment can be gone through wherever the prompt is known."""
        found = [self._prompt(split, i, row, tokenizer) for i, row in enumerate(self._rows(split))]
        return [prompt for prompt in found if len(prompt.tokens) <= max_tokens]

    def reply(self, prompt: Prompt, turns: Sequence[str], tokenizer: Any) -> Sequence[int] | None:
        said, heard = turns[::2], turns[1::2]
        asked, _ = self._wait(self._go_through_again(prompt, said))
        replies = [self._between(prompt, asked, said, turn, tokenizer) for turn in range(1, len(asked))]
        again = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in replies]
        if again[: len(heard)] != list(heard):
            raise self._failed(prompt.prompt_id, OTHERWISE)
        return replies[-1] if len(asked) > len(said) else None

    def reward(self, prompt: Prompt, response: Response) -> Reward:
        return self.rewards([(prompt, response)])[0]

    def rewards(self, asked: Sequence[tuple[Prompt, Response]]) -> list[Reward]:
        return self._wait(self._rewards(asked))

    async def _rewards(self, asked: Sequence[tuple[Prompt, Response]]) -> list[Reward]:
        """All of them run to their end, also where one fails."""
        found = await asyncio.gather(*(self._reward(*pair) for pair in asked), return_exceptions=True)
        return [_unless_failed(it) for it in found]

    async def _reward(self, prompt: Prompt, response: Response) -> Reward:
        said = (response.turns or (response.text,))[::2]
        _, state = await self._go_through_again(prompt, said, cut_off=not response.finished)
        try:
            await self.environment.rubric.score_group([state])
            await self.environment.rubric.cleanup(state)
        except _RewardFailed as failed:
            raise self._failed(prompt.prompt_id, f"reward function {failed}") from failed.__cause__
        except Exception as error:
            raise self._failed(prompt.prompt_id, f"scoring: {type(error).__name__}: {error}") from error
        if not math.isfinite(state["reward"]):
            raise self._failed(prompt.prompt_id, f"reward {state['reward']}")
        return Reward(value=state["reward"], parts=state["metrics"] or {})

    @cached_property
    def library(self) -> Any:
        library = import_module("verifiers")
        library.Client.register(Again)
        return library

    @cached_property
    def environment(self) -> Any:
        named = f"task.options.environment: {self.options.environment!r}"
        with _loading, _signals_left_alone():
            try:
                found = self.library.load_environment(self.options.environment, **self.options.arguments)
            except Exception as error:
                raise ConfigError(f"{named} cannot be loaded: {error}") from error
        members = list(_members(self.library, found))
        if foreign := [it for it in members if not isinstance(it, self.library.MultiTurnEnv)]:
            raise ConfigError(f"{named} is {type(foreign[0]).__name__}, which is not gone through turn by turn")
        for rubric in [rubric for member in members for rubric in _rubrics(member.rubric)]:
            if rubric.has_group_rewards:
                raise ConfigError(f"{named} rewards responses by comparing those of a group, which is not supported")
            if self.options.errors == "raise":
                rubric.funcs[:] = map(_raising, rubric.funcs)
        return found

    @cached_property
    def loop(self) -> asyncio.AbstractEventLoop:
        """One for life: what an environment opens in it, as connections to a judge, stays usable."""
        loop = asyncio.new_event_loop()
        weakref.finalize(self, loop.close)
        return loop

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def _rows(self, split: str) -> list[dict[str, Any]]:
        """Without a dataset to evaluate on, evaluations have the one to train on, as in the library."""
        found = self.environment.build_eval_dataset() if split == "test" else None
        found = self.environment.build_dataset() if found is None else found
        if found is None:
            raise DataError(
                f"task.options.environment: {self.options.environment!r} has no dataset for split {split!r}"
            )
        return found.to_list()

    def _prompt(self, split: str, index: int, row: Row, tokenizer: Any) -> Prompt:
        where = f"{split} row {index}"
        for field, value in row.items():
            _check_json(where, field, value)
        asked, _ = self._wait(self._go_through(where, row, []))
        if not asked:
            raise DataError(f"{where}: the environment ends before it has asked anything")
        messages, tools = asked[0]
        chat_template.check_tools(tokenizer, messages, tools)
        text = chat_template.opening(tokenizer, messages, tools)
        return Prompt(
            prompt_id=f"{split}-{index:05d}",
            text=text,
            tokens=tuple(chat_template.tokens(tokenizer, messages, text)),
            answer="" if row.get("answer") is None else str(row["answer"]),
            metadata={"row": row, "messages": messages, "tools": tools},
        )

    async def _go_through_again(
        self, prompt: Prompt, said: Sequence[str], *, cut_off: bool = False
    ) -> tuple[list[Asked], Any]:
        asked, state = await self._go_through(prompt.prompt_id, prompt.metadata["row"], said, cut_off=cut_off)
        if list(asked[0]) != [prompt.metadata["messages"], prompt.metadata["tools"]]:
            raise self._failed(prompt.prompt_id, OTHERWISE)
        return asked, state

    async def _go_through(
        self, where: str, row: Row, said: Sequence[str], *, cut_off: bool = False
    ) -> tuple[list[Asked], Any]:
        """What the environment asks for each of these answers, and for one more unless it ends; and its state then."""
        policy = Again(self.library, said, cut_off=cut_off)
        try:
            state = await self.environment.rollout(row, policy, "policy", {})
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        except Exception as error:
            raise self._failed(where, f"{type(error).__name__}: {error}") from error
        error = state.get("error")
        if error is not None and not isinstance(error, self.library.ToolError) and self.options.errors == "raise":
            raise self._failed(where, f"{type(error).__name__}: {error.__cause__ or error}") from error
        if len(policy.asked) < len(said):
            raise self._failed(where, f"ends after {len(policy.asked)} answers; before, it took {len(said)}")
        return policy.asked, state

    def _between(
        self, prompt: Prompt, asked: Sequence[Asked], said: Sequence[str], turn: int, tokenizer: Any
    ) -> list[int]:
        """The tokens from the end of an answer up to where the answer of this turn begins."""
        (before, tools), (now, tools_now) = asked[turn - 1], asked[turn]
        goes_on = now[: len(before)] == before and [it["role"] for it in now[len(before) :]][:1] == ["assistant"]
        if not goes_on or tools_now != tools:
            raise self._failed(
                prompt.prompt_id, "changes messages or tools that the policy has read; a response is one text"
            )
        words = [*before]
        for answer, (messages, _) in zip(said, asked[: turn - 1], strict=False):
            words[len(messages)] = {"role": "assistant", "content": answer}
        return chat_template.between(tokenizer, words, now[len(before) + 1 :], tools)

    def _failed(self, where: str, what: str) -> RunFailed:
        return RunFailed(f"{where}: environment {self.options.environment!r}: {what}")


class _RewardFailed(BaseException):
    """No Exception: the library makes a reward of 0 of those."""


def _raising(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    async def reward(*args: Any, **kwargs: Any) -> float:
        try:
            found = function(*args, **kwargs)
            return float(await found if isawaitable(found) else found)
        except Exception as error:
            name = getattr(function, "__name__", repr(function))
            raise _RewardFailed(f"{name!r}: {type(error).__name__}: {error}") from error

    return reward


def _members(library: Any, environment: Any) -> Iterator[Any]:
    """An environment, or those that it is a group of."""
    if not isinstance(environment, library.EnvGroup):
        yield environment
        return
    for member in environment.envs:
        yield from _members(library, member)


def _rubrics(rubric: Any) -> Iterator[Any]:
    yield rubric
    for part in getattr(rubric, "rubrics", ()):
        yield from _rubrics(part)


@contextmanager
def _signals_left_alone() -> Iterator[None]:
    """An environment takes the signals that end a process for itself as it is made; they are the role's."""
    handle = signal.signal
    signal.signal = lambda *_: None
    try:
        yield
    finally:
        signal.signal = handle


def _check_installed() -> None:
    needed = (
        "task 'verifiers' needs the library of this name, 0.1.14 or later before 0.4: "
        "pip install --no-deps -r requirements-verifiers.txt"
    )
    try:
        installed = version("verifiers")
    except PackageNotFoundError:
        raise ConfigError(needed) from None
    if not (0, 1, 14) <= tuple(map(int, re.findall(r"\d+", installed)[:3])) < (0, 4):
        raise ConfigError(f"{needed}; {installed} is installed")


def _check_module(environment: str) -> None:
    search_working_folder()
    module = environment.replace("-", "_").split("/")[-1]  # as the library has it
    try:
        found = find_spec(module)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise ConfigError(
            f"task.options.environment: no module {module!r} for {environment!r}; is it installed, or in {os.getcwd()}?"
        )


def _check_json(where: str, field: str, value: Any) -> None:
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: field {field!r} must be JSON, got {value!r:.80}") from error


def _unless_failed(found: T | BaseException) -> T:
    if isinstance(found, BaseException):
        raise found
    return found
