"""What a task's own code raises is told by the task, the method, the prompt and the line."""

import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from benchmarks.harness import fakes
from tba.errors import ConfigError, DataError, RunFailed, Stopped, StorageError
from tba.generation.requests import generate
from tba.search import turns
from tba.search.scoring import Scoring
from tba.tasks.guard import asking
from tba.tasks.steps import step_ends
from tba.types import Prompt, Response, Reward, Version


class Wrong(fakes.Task):
    """Its answers are not JSON."""

    name = "wrong"

    def reward(self, prompt: Prompt, response: Response) -> Reward:
        return Reward(value=self.read(response))

    def read(self, response: Response) -> float:
        return json.loads(response.text)  # the line at fault

    def reply(self, prompt: Prompt, turns: Sequence[str], tokenizer: Any) -> Sequence[int] | None:
        return json.loads(turns[-1])

    def step_ends(self, text: str) -> Sequence[int]:
        return json.loads(text)


class WrongTogether(Wrong):
    def rewards(self, asked: Sequence[tuple[Prompt, Response]]) -> list[Reward]:
        return [self.reward(*pair) for pair in asked]


PROMPTS = fakes.make_prompts(2)


def responses() -> list[list[Response]]:
    generator = fakes.Generator()
    generator.version = Version(0, 1)
    return generate(generator, PROMPTS, [[1], [0]], temperature=1.0)


def line_of(method: Callable[..., Any], text: str) -> int:
    lines, first = inspect.getsourcelines(method)
    return first + next(n for n, line in enumerate(lines) if text in line)


def answered() -> object:
    generator = fakes.Generator()
    generator.version = Version(0, 1)
    return generate(turns.whole(Wrong(), generator), PROMPTS[1:], [[0]], temperature=1.0)


@pytest.mark.parametrize(
    ("ask", "what", "place"),
    [
        (lambda: Scoring(Wrong()).rewards(PROMPTS, responses()), "reward of prompt 'p1'", Wrong.read),
        (lambda: Scoring(WrongTogether()).rewards(PROMPTS, responses()), "rewards", Wrong.read),
        (answered, "reply of prompt 'p1'", Wrong.reply),
        (lambda: step_ends(Wrong(), None, responses()[1][0]), "step_ends", Wrong.step_ends),
    ],
)
def test_what_a_task_raises_is_told_with_the_line_of_its_code_not_of_the_library_it_called(
    ask: Callable[[], object], what: str, place: Callable[..., Any]
):
    with pytest.raises(DataError) as told:
        ask()
    where = f"{__file__}, line {line_of(place, 'json.loads')}"
    why = "JSONDecodeError: Expecting value: line 1 column 1 (char 0)"
    assert str(told.value) == f"task 'wrong': {what} raised {why} ({where})"
    assert isinstance(told.value.__cause__, json.JSONDecodeError)


def test_a_method_that_cannot_be_called_as_it_is_is_told_without_a_line():
    task: Any = type("Short", (fakes.Task,), {"reward": lambda self, prompt: Reward(value=1.0)})()
    with pytest.raises(DataError, match=r"reward of prompt 'p0' raised TypeError: .* 3 were given$"):
        Scoring(task).rewards(PROMPTS, responses())


@pytest.mark.parametrize(
    "error",
    [
        *(kind("ours") for kind in (ConfigError, DataError, StorageError, RunFailed, Stopped)),
        *(kind("may pass") for kind in (ConnectionError, TimeoutError, OSError, MemoryError, torch.OutOfMemoryError)),
    ],
)
def test_errors_of_ours_and_those_that_may_pass_are_raised_as_they_are(error: Exception):
    with pytest.raises(type(error)) as raised, asking(fakes.Task(), "reward"):
        raise error
    assert raised.value is error


def test_a_librarys_own_error_of_a_service_that_does_not_answer_may_pass_too():
    """As httpx and the clients built on it raise theirs."""
    with pytest.raises(LookupError), asking(fakes.Task(), "reward"):
        raise LookupError("no answer") from ConnectionError("refused")
    with pytest.raises(DataError), asking(fakes.Task(), "reward"):
        raise LookupError("no answer") from ValueError("no number")
