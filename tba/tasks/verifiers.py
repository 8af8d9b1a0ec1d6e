"""A task that is made of an environment of the library `verifiers`, with the environment's prompts, turns, tools and
rewards.

An environment keeps a state during a conversation, but a task must answer from the prompt and the turns alone. So each
call replays the conversation from its beginning, in the library's own loop, with a policy that repeats the answers
given so far. The loop ends when that policy has no answer left.
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
from tba.tasks.verifiers_client import Asked, RepeatingClient
from tba.types import Prompt, Response, Reward

T = TypeVar("T")
Row = Mapping[str, Any]
OTHERWISE = "does not repeat what it said before, given the same answers"
_loading = threading.Lock()


@settings
class Options:
    environment: str
    """Name of the environment, as the library's `load_environment` takes it: the id of an environment, or a module that
    has a function `load_environment`."""
    arguments: dict[str, JsonValue] = Field(default_factory=dict)
    """Arguments with which the function `load_environment` is called."""
    errors: Literal["raise", "zero"] = "raise"
    """What happens if the environment or a reward function fails. `raise`: the role fails too. `zero`: the failed
    reward function counts as 0, as in the library."""


class Verifiers:
    """A task that takes turns. If the environment does not answer, a response has a single turn."""

    name = "verifiers"

    def __init__(self, config: TaskConfig):
        for field in ("train", "test", "rule", "template"):
            if value := getattr(config, field):
                raise ConfigError(
                    f"task.{field} must be empty: an environment has its own prompts and rewards, got {value!r}"
                )
        self.options = parse_options(Options, config)
        _check_installed()
        _check_module(self.options.environment)

    @staticmethod
    def preset() -> Config:
        """Return settings that suit a small language model."""
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
        """Make a prompt of each row of the environment's dataset: the messages with which the environment begins. The
        metadata of a prompt has the row and the messages, so that the conversation can be replayed from the prompt
        alone."""
        prompts = [self._prompt(split, i, row, tokenizer) for i, row in enumerate(self._rows(split))]
        return [prompt for prompt in prompts if len(prompt.tokens) <= max_tokens]

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
        """Compute all rewards at the same time. If a computation fails, raise its error once all computations have
        ended."""
        results = await asyncio.gather(*(self._reward(*pair) for pair in asked), return_exceptions=True)
        return [_unless_failed(result) for result in results]

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
        library.Client.register(RepeatingClient)
        return library

    @cached_property
    def environment(self) -> Any:
        named = f"task.options.environment: {self.options.environment!r}"
        with _loading, _signals_left_alone():
            try:
                environment = self.library.load_environment(self.options.environment, **self.options.arguments)
            except Exception as error:
                raise ConfigError(f"{named} cannot be loaded: {error}") from error
        members = list(_members(self.library, environment))
        if foreign := [member for member in members if not isinstance(member, self.library.MultiTurnEnv)]:
            raise ConfigError(
                f"{named} must be a MultiTurnEnv, which goes turn by turn, got {type(foreign[0]).__name__}"
            )
        for rubric in [rubric for member in members for rubric in _rubrics(member.rubric)]:
            if rubric.has_group_rewards:
                raise ConfigError(f"{named} rewards responses by comparing those of a group, which is not supported")
            if self.options.errors == "raise":
                rubric.funcs[:] = map(_raising, rubric.funcs)
        return environment

    @cached_property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The one event loop of this task. Resources that an environment opens in the loop, such as connections to a
        judge, stay usable."""
        loop = asyncio.new_event_loop()
        weakref.finalize(self, loop.close)
        return loop

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def _rows(self, split: str) -> list[dict[str, Any]]:
        """Return the rows of a split. Without a dataset for evaluation, evaluations use the training dataset, as in the
        library."""
        dataset = self.environment.build_eval_dataset() if split == "test" else None
        dataset = self.environment.build_dataset() if dataset is None else dataset
        if dataset is None:
            raise DataError(
                f"task.options.environment: {self.options.environment!r} has no dataset for split {split!r}"
            )
        return dataset.to_list()

    def _prompt(self, split: str, index: int, row: Row, tokenizer: Any) -> Prompt:
        where = f"{split} row {index}"
        for field, value in row.items():
            _check_json(where, field, value)
        asked, _ = self._wait(self._go_through(where, row, []))
        if not asked:
            raise DataError(f"{where}: the environment ends before it asks anything")
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
        """Replay a conversation in which the policy gives the answers `said`. Return a list of what the environment
        asked before each answer, and the environment's state at the end. If the conversation goes on after the last
        answer, the list ends with what the environment asks next."""
        policy = RepeatingClient(self.library, said, cut_off=cut_off)
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
            raise self._failed(where, f"ends after {len(policy.asked)} answers, but took {len(said)} before")
        return policy.asked, state

    def _between(
        self, prompt: Prompt, asked: Sequence[Asked], said: Sequence[str], turn: int, tokenizer: Any
    ) -> list[int]:
        """Return the tokens between the policy's answer in turn `turn` - 1 and the policy's answer in turn `turn`."""
        (before, tools), (now, tools_now) = asked[turn - 1], asked[turn]
        roles_added = [message["role"] for message in now[len(before) :]]
        goes_on = now[: len(before)] == before and roles_added[:1] == ["assistant"]
        if not goes_on or tools_now != tools:
            raise self._failed(
                prompt.prompt_id, "changes messages or tools that the policy has read; a response must stay one text"
            )
        words = [*before]
        for answer, (messages, _) in zip(said, asked[: turn - 1], strict=False):
            words[len(messages)] = {"role": "assistant", "content": answer}
        return chat_template.between(tokenizer, words, now[len(before) + 1 :], tools)

    def _failed(self, where: str, what: str) -> RunFailed:
        return RunFailed(f"{where}: environment {self.options.environment!r}: {what}")


class _RewardFailed(BaseException):
    """A reward function failed. This is not an Exception, because the library turns Exceptions into a reward of 0."""


def _raising(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    async def reward(*args: Any, **kwargs: Any) -> float:
        try:
            value = function(*args, **kwargs)
            return float(await value if isawaitable(value) else value)
        except Exception as error:
            name = getattr(function, "__name__", repr(function))
            raise _RewardFailed(f"{name!r}: {type(error).__name__}: {error}") from error

    return reward


def _members(library: Any, environment: Any) -> Iterator[Any]:
    """Yield an environment, or the members of a group of environments."""
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
    """Keep an environment from installing its own signal handlers while it is made, because the role handles
    signals."""
    handle = signal.signal
    signal.signal = lambda *_: None
    try:
        yield
    finally:
        signal.signal = handle


def _check_installed() -> None:
    needed = (
        "task 'verifiers' needs the library verifiers, at least 0.1.14 and below 0.4: "
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
    module = environment.replace("-", "_").split("/")[-1]  # the name that the library imports
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise ConfigError(
            f"task.options.environment: no module {module!r} for {environment!r}; is it installed, or in {os.getcwd()}?"
        )


def _check_json(where: str, field: str, value: Any) -> None:
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: field {field!r} must be JSON, got {value!r:.80}") from error


def _unless_failed(result: T | BaseException) -> T:
    if isinstance(result, BaseException):
        raise result
    return result
