"""Competition problems of the MATH dataset. The reward is 1 if the answer in the box of the response is right.

There are four rules for grading. They give different scores for the same responses, so report which rule was used. TBA′
uses `boxed`, VinePPO uses `minerva`, `prm800k` was published with the dataset PRM800K, and `math-verify` uses the
library of this name.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from tba.config import TaskConfig, parse_options, settings
from tba.errors import DataError
from tba.grading import minerva as minerva_grader
from tba.grading import prm800k as prm800k_grader
from tba.grading.algebra_process import verified
from tba.grading.latex import LONGEST, after_thinking, decimal, hendrycks, last_box
from tba.models import chat_template
from tba.tasks.fields import one_of, text_in
from tba.tasks.math500 import is_held_out
from tba.tasks.steps import line_ends
from tba.types import Prompt, Response, Reward

REQUEST = "Please reason step by step, and put your final answer within \\boxed{}."
TEMPLATES = ("qwen-boxed", "plain")
SOURCES = {
    "train": "hf://datasets/nlile/hendrycks-MATH-benchmark/data/train-00000-of-00001.parquet",  # 12 000 of 12 500
    "test": "hf://datasets/HuggingFaceH4/MATH-500/test.jsonl",
}

_SENTENCE = re.compile(r"(?<!^\d)[.!?]\s+", re.MULTILINE)  # "1. " at the start of a line ends no sentence
_FORMULA = re.compile(r"\$\$.+?\$\$|\$[^$]+\$|\\\[.+?\\\]|\\\(.+?\\\)", re.DOTALL)


def math_verify(response: str, answer: str) -> bool:
    """Return True if the last box after the thinking has the right answer: its text equals the gold answer by the
    dataset's own rule, or the library math-verify accepts it."""
    boxed_answer = last_box(after_thinking(response))
    if not boxed_answer:
        return False
    if hendrycks(boxed_answer) == hendrycks(answer) != "":
        return True
    number, gold = decimal(boxed_answer), decimal(answer)
    if number is not None and gold is not None and number.denominator == gold.denominator == 1:
        return number == gold  # the library would return the same, but is slower
    return verified(boxed_answer, answer)


def minerva(response: str, answer: str) -> bool:
    """Return True if the answer matches the gold answer in the generous comparison of `tba.grading.minerva`. The answer
    is read from all boxes, or else from the text after "the answer is", or else from the last number."""
    return minerva_grader.is_right(response, answer)


def prm800k(response: str, answer: str) -> bool:
    """Return True if the answer matches the gold answer in the strict comparison of `tba.grading.prm800k`. The answer
    is the last box anywhere in the response, or else the text after "# Answer"."""
    _, heading, last = response.rpartition("# Answer\n")
    final_answer = last_box(response) or (last.strip() if heading else "")
    return 0 < len(final_answer) <= LONGEST and prm800k_grader.is_right(final_answer, answer)


def boxed(response: str, answer: str) -> bool:
    """Return True if the last box after the thinking matches the gold answer in the strict comparison of
    `tba.grading.prm800k`."""
    boxed_answer = last_box(after_thinking(response))
    return bool(boxed_answer) and prm800k_grader.is_right(boxed_answer, answer)


RULES: dict[str, Callable[[str, str], bool]] = {
    "math-verify": math_verify,
    "minerva": minerva,
    "prm800k": prm800k,
    "boxed": boxed,
}


@settings
class Options:
    levels: tuple[Annotated[int, Field(ge=1, le=5)], ...] = ()
    """Levels of difficulty, from 1 to 5, of the training problems. Empty takes the problems of all levels."""


class Math:
    """Trains on the 12 000 problems that are not in MATH-500, and evaluates on MATH-500."""

    name = "math"
    rules = RULES

    def __init__(self, config: TaskConfig):
        self.config, self.options = config, parse_options(Options, config)
        self.template = one_of("template", config.template or TEMPLATES[0], TEMPLATES)
        self.rule = RULES[one_of("rule", config.rule or "math-verify", RULES)]

    def source(self, split: str) -> str:
        return SOURCES[split]

    def prompts(
        self, split: str, rows: Sequence[Mapping[str, Any]], tokenizer: Any, *, max_tokens: int
    ) -> list[Prompt]:
        """Make a prompt of each row. The row has a `problem`, and an `answer` or else a `solution` whose last box is
        the answer. `level` and `subject` become metadata. Problems of MATH-500 are left out of training. Raise
        DataError if more than half of the training rows are problems of MATH-500."""
        problems = [text_in(split, i, row, "problem") for i, row in enumerate(rows)]
        golds = [_gold(split, i, row) for i, row in enumerate(rows)]
        left_out = self._held_out(problems) | self._other_levels(split, rows) if split == "train" else frozenset()
        prompts = [
            Prompt(
                prompt_id=f"{split}-{i:05d}",
                text=text,
                tokens=tokens,
                answer=golds[i],
                metadata={field: row[field] for field in ("level", "subject") if row.get(field) is not None},
            )
            for i, row in enumerate(rows)
            if i not in left_out
            for text, tokens in [self._worded(problems[i], tokenizer)]
        ]
        return [prompt for prompt in prompts if len(prompt.tokens) <= max_tokens]

    def reward(self, prompt: Prompt, response: Response) -> Reward:
        return Reward(value=float(self.rule(response.text, prompt.answer)))

    def step_ends(self, text: str) -> list[int]:
        """Return where reasoning steps end: after each sentence and each line, but never inside a formula."""
        places = {*line_ends(text), *(sentence.end() for sentence in _SENTENCE.finditer(text))}
        inside = [range(formula.start() + 1, formula.end()) for formula in _FORMULA.finditer(text)]
        return sorted(place for place in places if not any(place in span for span in inside))

    def _held_out(self, problems: Sequence[str]) -> frozenset[int]:
        held_out = frozenset(i for i, problem in enumerate(problems) if is_held_out(problem))
        if 2 * len(held_out) > len(problems):
            raise DataError(
                f"task.train must not be MATH-500, which is for evaluation only: {len(held_out)} of {len(problems)} "
                f"rows of {self.config.train or self.source('train')} are its problems"
            )
        return held_out

    def _other_levels(self, split: str, rows: Sequence[Mapping[str, Any]]) -> frozenset[int]:
        if not self.options.levels:
            return frozenset()
        return frozenset(i for i, row in enumerate(rows) if _level(split, i, row) not in self.options.levels)

    def _worded(self, problem: str, tokenizer: Any) -> tuple[str, tuple[int, ...]]:
        """Return the text and tokens of a prompt. `qwen-boxed` uses the model's chat template, or the wording of
        `plain` if the model has none."""
        message = {"role": "user", "content": f"{problem}\n\n{REQUEST}"}
        if self.template == "plain" or not chat_template.has_template(tokenizer):
            message = {"role": "text", "content": f"Problem:\n{problem}\n\n{REQUEST}\n\nSolution:\n"}
        text = chat_template.opening(tokenizer, [message])
        return text, tuple(chat_template.tokens(tokenizer, [message], text))


def _level(split: str, index: int, row: Mapping[str, Any]) -> int:
    """Return the level of a row, which is stored as a number or as "Level 3". Return 0 for the few problems with "Level
    ?"."""
    level = row.get("level")
    if level is None:
        raise DataError(f"{split} row {index}: task.options.levels needs field 'level', got {level!r}")
    digits = str(level).rpartition(" ")[2]
    return int(digits) if digits.isdigit() else 0


def _gold(split: str, index: int, row: Mapping[str, Any]) -> str:
    if row.get("answer") is not None:
        return text_in(split, index, row, "answer").strip()
    gold = last_box(text_in(split, index, row, "solution"))
    if not gold:
        raise DataError(
            f"{split} row {index}: no field 'answer', and no \\boxed{{}} with the answer in field 'solution'"
        )
    return gold
