"""Grade-school word problems in the paper's wording. The reward is 1 if the number read from the response is right.

There are three published rules for reading the answer. They give different scores for the same responses, so report
which rule was used. TBA uses `last-number`, VinePPO uses `after-hashes`, and Async RLHF uses `strict-hashes`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tba.config import TaskConfig
from tba.errors import DataError
from tba.tasks.fields import one_of, text_in
from tba.tasks.steps import line_ends
from tba.types import Prompt, Response, Reward

TEMPLATES = {
    "tba": "[MATH TASK] Problem:\n{question}\n\nSolution:\n",
    "vineppo": "[MATH_TASK] Problem:\n{question}\n\nSolution:",  # the paper's starting policy learned this one
}

_NUMBER = re.compile(r"[+-]?[0-9]+\.[0-9]*|[+-]?\.[0-9]+|[+-]?[0-9]+e[+-]?[0-9]+|[+-]?[0-9]+")
_HASHES = re.compile(r"#### (-?[0-9.,]+)")


def last_number(response: str, answer: str) -> bool:
    """Return True if the last number in the response equals the last number in the gold answer. Both are read without
    commas and compared as floats. The number may also be part of a unit or a year; "5-3" is read as -3 and "1.5e3" as
    3; and a truncated response is graded by the last number that it contains."""
    number, gold = _last_number(response), _last_number(answer)
    return number is not None and number == gold


def after_hashes(response: str, answer: str) -> bool:
    """Return True if the text after the last "####" in the response is the gold answer, in upper or lower case. Commas
    are deleted from the text of the response, but not from the gold answer: if the gold answer has a comma, no response
    is right."""
    _, hashes, text = response.rpartition("####")
    text = text.strip().replace(",", "").lower()
    return bool(hashes and text) and text == answer.strip().lower()


def strict_hashes(response: str, answer: str) -> bool:
    """Return True if the number after the first "#### " is that of the gold answer: an optional minus, then digits,
    points and commas. The two numbers are compared as text, without commas."""
    number, gold = _HASHES.search(response), _HASHES.search(f"#### {answer}")
    return number is not None and gold is not None and number[1].replace(",", "") == gold[1].replace(",", "")


RULES: dict[str, Callable[[str, str], bool]] = {
    "last-number": last_number,
    "after-hashes": after_hashes,
    "strict-hashes": strict_hashes,
}


class GSM8K:
    """The dataset GSM8K. The default template `tba` and the default rule `last-number` are those of the TBA paper."""

    name = "gsm8k"
    rules = RULES

    def __init__(self, config: TaskConfig):
        self.template = TEMPLATES[one_of("template", config.template or "tba", TEMPLATES)]
        self.rule = RULES[one_of("rule", config.rule or "last-number", RULES)]

    def source(self, split: str) -> str:
        return f"hf://datasets/openai/gsm8k/main/{split}-00000-of-00001.parquet"

    def prompts(
        self, split: str, rows: Sequence[Mapping[str, Any]], tokenizer: Any, *, max_tokens: int
    ) -> list[Prompt]:
        """Make a prompt of each row. The row has a `question`, and an `answer`: a worked solution that ends in "#### "
        and the gold answer."""
        golds = [_gold(split, i, row) for i, row in enumerate(rows)]
        texts = [self.template.format(question=text_in(split, i, row, "question")) for i, row in enumerate(rows)]
        tokens = tokenizer(texts).input_ids if texts else []
        prompts = [
            Prompt(prompt_id=f"{split}-{i:05d}", text=text, tokens=tuple(ids), answer=gold)
            for i, (text, ids, gold) in enumerate(zip(texts, tokens, golds, strict=True))
        ]
        return [prompt for prompt in prompts if len(prompt.tokens) <= max_tokens]

    def reward(self, prompt: Prompt, response: Response) -> Reward:
        return Reward(value=float(self.rule(response.text, prompt.answer)))

    def step_ends(self, text: str) -> list[int]:
        """Return where reasoning steps end: each line is a step, as in VinePPO. A line that begins with "####" belongs
        to the step before it."""
        return [place for place in line_ends(text) if not text.startswith("####", place)]


def _last_number(text: str) -> float | None:
    numbers = _NUMBER.findall(text.replace(",", ""))
    return float(numbers[-1]) if numbers else None


def _gold(split: str, index: int, row: Mapping[str, Any]) -> str:
    _, hashes, gold = text_in(split, index, row, "answer").rpartition("####")
    if not hashes or not gold.strip():
        raise DataError(f"{split} row {index}: field 'answer' does not end in \"#### \" and the gold answer")
    return gold.strip()
