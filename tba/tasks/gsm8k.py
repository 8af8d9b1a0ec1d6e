"""Grade-school word problems: the question in the paper's wording, reward 1 if the number that is read out is right.

Three published ways of reading the answer give different numbers on the same responses, so all are here; say which one
was used. `last-number` is TBA's, `after-hashes` VinePPO's, `strict-hashes` that of Async RLHF.
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
    "vineppo": "[MATH_TASK] Problem:\n{question}\n\nSolution:",  # what the paper's starting policy was fine-tuned on
}

_NUMBER = re.compile(r"[+-]?[0-9]+\.[0-9]*|[+-]?\.[0-9]+|[+-]?[0-9]+e[+-]?[0-9]+|[+-]?[0-9]+")
_HASHES = re.compile(r"#### (-?[0-9.,]+)")


def last_number(response: str, answer: str) -> bool:
    """The last number anywhere, commas deleted; equal as floats. It also takes a unit, a year, "5-3" as -3 and "1.5e3"
    as 3, and the last number of a response that was cut off."""
    found, gold = _last_number(response), _last_number(answer)
    return found is not None and found == gold


def after_hashes(response: str, answer: str) -> bool:
    """All that follows the last "####"; equal to the gold as text, once its own commas are deleted. Commas of the gold
    stay, so those problems cannot be won."""
    _, hashes, found = response.rpartition("####")
    found = found.strip().replace(",", "").lower()
    return bool(hashes and found) and found == answer.strip().lower()


def strict_hashes(response: str, answer: str) -> bool:
    """Digits, points and commas after the first "####", one space and perhaps a minus; equal as text without commas."""
    found, gold = _HASHES.search(response), _HASHES.search(f"#### {answer}")
    return found is not None and gold is not None and found[1].replace(",", "") == gold[1].replace(",", "")


RULES: dict[str, Callable[[str, str], bool]] = {
    "last-number": last_number,
    "after-hashes": after_hashes,
    "strict-hashes": strict_hashes,
}


class GSM8K:
    """The template `tba` and the rule `last-number` are the defaults: together they are the paper's."""

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
        """Rows have `question` and `answer`, the worked solution that ends in "#### " and the gold."""
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
        """At lines, as VinePPO has it; one that begins with "####" belongs to the step before it."""
        return [place for place in line_ends(text) if not text.startswith("####", place)]


def _last_number(text: str) -> float | None:
    numbers = _NUMBER.findall(text.replace(",", ""))
    return float(numbers[-1]) if numbers else None


def _gold(split: str, index: int, row: Mapping[str, Any]) -> str:
    _, hashes, gold = text_in(split, index, row, "answer").rpartition("####")
    if not hashes or not gold.strip():
        raise DataError(f"{split} row {index}: field 'answer' does not end in \"#### \" and the gold answer")
    return gold.strip()
