"""Competition problems of the MATH dataset: reward 1 if the answer in the response's box is the right one.

Four published ways of grading give different numbers on the same responses; say which one was used. `boxed` is that of
TBA′, `minerva` VinePPO's, `prm800k` that of the dataset of this name, and `math-verify` a library's.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from tba.config import TaskConfig, parse_options, settings
from tba.errors import DataError
from tba.grading import minerva as minerva_grader
from tba.grading import prm800k as prm800k_grader
from tba.grading.helper import verified
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

_SENTENCE = re.compile(r"(?<!^\d)[.!?]\s+", re.MULTILINE)  # "1. " at the start of a line is none
_FORMULA = re.compile(r"\$\$.+?\$\$|\$[^$]+\$|\\\[.+?\\\]|\\\(.+?\\\)", re.DOTALL)


def math_verify(response: str, answer: str) -> bool:
    """The last box after the thinking: as text, by the rule of the dataset itself, or else by the library."""
    given = last_box(after_thinking(response))
    if not given:
        return False
    if hendrycks(given) == hendrycks(answer) != "":
        return True
    ours, theirs = decimal(given), decimal(answer)
    if ours is not None and theirs is not None and ours.denominator == theirs.denominator == 1:
        return ours == theirs  # as the library would find, but sooner
    return verified(given, answer)


def minerva(response: str, answer: str) -> bool:
    """All boxes, or else what "the answer is", or else the last number; compared generously."""
    return minerva_grader.is_right(response, answer)


def prm800k(response: str, answer: str) -> bool:
    """The last box anywhere, or else what follows "# Answer"; strict about the form."""
    _, heading, last = response.rpartition("# Answer\n")
    given = last_box(response) or (last.strip() if heading else "")
    return 0 < len(given) <= LONGEST and prm800k_grader.is_right(given, answer)


def boxed(response: str, answer: str) -> bool:
    """The last box after the thinking, compared as `prm800k` does."""
    given = last_box(after_thinking(response))
    return bool(given) and prm800k_grader.is_right(given, answer)


RULES: dict[str, Callable[[str, str], bool]] = {
    "math-verify": math_verify,
    "minerva": minerva,
    "prm800k": prm800k,
    "boxed": boxed,
}


@settings
class Options:
    levels: tuple[Annotated[int, Field(ge=1, le=5)], ...] = ()
    """Of which difficulty the problems to train on are; empty takes all."""


class Math:
    """Trained on the 12 000 problems that are not in MATH-500, evaluated on MATH-500."""

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
        """Rows have `problem`, and `answer` or else `solution`, whose last box is the answer; `level` and `subject` are
        kept. Problems of MATH-500 are left out of training, and a training set made of them is refused."""
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
        """At sentences and lines; a formula is not divided."""
        places = {*line_ends(text), *(sentence.end() for sentence in _SENTENCE.finditer(text))}
        inside = [range(formula.start() + 1, formula.end()) for formula in _FORMULA.finditer(text)]
        return sorted(place for place in places if not any(place in span for span in inside))

    def _held_out(self, problems: Sequence[str]) -> frozenset[int]:
        found = frozenset(i for i, problem in enumerate(problems) if is_held_out(problem))
        if 2 * len(found) > len(problems):
            raise DataError(
                f"task.train: {self.config.train or self.source('train')} is MATH-500, which is for evaluation alone: "
                f"{len(found)} of {len(problems)} rows are problems of it"
            )
        return found

    def _other_levels(self, split: str, rows: Sequence[Mapping[str, Any]]) -> frozenset[int]:
        if not self.options.levels:
            return frozenset()
        return frozenset(i for i, row in enumerate(rows) if _level(split, i, row) not in self.options.levels)

    def _worded(self, problem: str, tokenizer: Any) -> tuple[str, tuple[int, ...]]:
        """`qwen-boxed` is a message to the model in its chat template; where it has none, it is worded as `plain`."""
        message = {"role": "user", "content": f"{problem}\n\n{REQUEST}"}
        if self.template == "plain" or not chat_template.has_template(tokenizer):
            message = {"role": "text", "content": f"Problem:\n{problem}\n\n{REQUEST}\n\nSolution:\n"}
        text = chat_template.opening(tokenizer, [message])
        return text, tuple(chat_template.tokens(tokenizer, [message], text))


def _level(split: str, index: int, row: Mapping[str, Any]) -> int:
    """Written as a number or as "Level 3"; a few problems have "Level ?", which is none."""
    given = row.get("level")
    if given is None:
        raise DataError(f"{split} row {index}: task.options.levels needs field 'level', got {given!r}")
    digits = str(given).rpartition(" ")[2]
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
