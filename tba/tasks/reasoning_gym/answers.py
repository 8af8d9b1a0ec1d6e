"""Rules that read the answer out of a response.

Data sets of reasoning_gym score an answer, not a response: most of them compare the answer with the right one letter by
letter. So the rule decides how much a response may say beside its answer. What precedes `</think>` is never read.
"""

import re
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from typing import NamedTuple

from tba.grading.latex import after_thinking, last_box

_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_NUMBER = re.compile(
    r"(?:(?<![\w).])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?"
)  # "5-3" ends in 3, "= -3" in -3


def whole(text: str) -> str:
    """Return the whole response, without white space around it."""
    return text.strip()


def last_line(text: str) -> str:
    """Return the last line that is not blank."""
    return text.strip().rpartition("\n")[2].strip()


def last_number(text: str) -> str:
    """Return the last number, without the commas between thousands."""
    numbers = _NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else ""


def tags(text: str) -> str:
    """Return what stands in the last pair of <answer> and </answer>, as the library itself does."""
    answers = _TAGS.findall(text)
    return answers[-1].strip() if answers else ""


def boxed(text: str) -> str:
    r"""Return what stands in the last \boxed{}."""
    return last_box(text) or ""


READERS: dict[str, Callable[[str], str]] = {
    "tags": tags,
    "boxed": boxed,
    "last-number": last_number,
    "last-line": last_line,
    "whole": whole,
}
"""The ways to read an answer. Each returns an empty text if it finds none."""

RULES: dict[str, tuple[str, ...]] = {
    "auto": ("tags", "boxed", "last-number", "whole"),
    **{name: (name,) for name in READERS},
}
"""The values of `task.rule`, the default first. Each is a sequence of ways, of which the first one that finds an answer
is used. `auto` looks for a number only if the right answer is one."""


class Answer(NamedTuple):
    text: str | None  # None if no way found an answer
    way: str  # the way that found the answer; "" if none did


def read_answer(rule: str, response: str, right_answer: str) -> Answer:
    text = after_thinking(response)
    for way in RULES[rule]:
        if rule == "auto" and way == "last-number" and _number(right_answer) is None:
            continue
        if answer := READERS[way](text):
            return Answer(answer, way)
    return Answer(None, "")


def grade(rule: str, response: str, answer: str) -> bool:
    """Return True if the answer in a response is the right one, as a text or as a number. This is for `tba grade`,
    which knows no data set."""
    read, right = read_answer(rule, response, answer).text, answer.strip()
    if read is None or read == right:
        return read == right
    return (number := _number(read)) is not None and number == _number(right)


GRADERS: dict[str, Callable[[str, str], bool]] = {rule: partial(grade, rule) for rule in RULES}


def _number(text: str) -> Decimal | None:
    try:
        number = Decimal(text.replace(",", ""))
    except ArithmeticError:
        return None
    return number if number.is_finite() else None
