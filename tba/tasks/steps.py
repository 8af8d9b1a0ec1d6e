"""Divide a response into reasoning steps. The task may say where steps end; otherwise each line is a step. The end of a
step is counted in tokens."""

import re
from bisect import bisect_left
from typing import Any

from tba.interfaces import SplitsIntoSteps, Task
from tba.tasks.guard import asking
from tba.types import Response

_LINE = re.compile(r"\S[^\n]*\n\s*")


def line_ends(text: str) -> list[int]:
    """Return the position after each line that is not blank, and after the white space that follows the line."""
    return [line.end() for line in _LINE.finditer(text)]


def step_ends(task: Task, tokenizer: Any, response: Response) -> tuple[int, ...]:
    """Return, for each reasoning step of a response, the number of tokens up to the end of the step. The last step ends
    with the response, and the end token of the response belongs to it."""
    text, tokens = response.text, response.tokens
    places = _step_ends(task, text) if isinstance(task, SplitsIntoSteps) else line_ends(text)

    def reached(count: int) -> int:
        return len(tokenizer.decode(tokens[:count], skip_special_tokens=True))

    inside = {bisect_left(range(len(tokens)), place, key=reached) for place in places if 0 < place < len(text)}
    return (*sorted(inside - {len(tokens)}), len(tokens))


def _step_ends(task: SplitsIntoSteps, text: str) -> list[int]:
    with asking(task, "step_ends"):
        return list(task.step_ends(text))
