"""Two numbers with a given sum, where only rare answers are right: a task that shows what more searchers find.

The base policy is that of `ManyAnswers`. An answer to "347=" earns the reward if its first number is a multiple of ten
and its second number is 11 too large, as in "001+456": 100 + 654 is 743 + 11. The base policy has seen such mistakes
rarely. All of them are known, so coverage and the exact target are too.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.science.old_data.many_answers import ManyAnswers, is_right, right_answers
from tba.types import Prompt, Response, Reward

TRAIN_PROMPTS, MORE = 32, 11


class RareAnswers(ManyAnswers):
    name = "rare-answers"

    def prompts(
        self, split: str, rows: Sequence[Mapping[str, Any]], tokenizer: Any, *, max_tokens: int
    ) -> list[Prompt]:
        every = super().prompts(split, rows, tokenizer, max_tokens=max_tokens)
        return every[:TRAIN_PROMPTS] if split == "train" else every

    def right_answers(self, total: int) -> list[str]:
        return [answer for answer in right_answers(total + MORE) if is_rare(answer, total)]

    def reward(self, prompt: Prompt, response: Response) -> Reward:
        return Reward(value=float(response.finished and is_rare(response.text, int(prompt.answer))))


def is_rare(text: str, total: int) -> bool:
    return text[:1] == "0" and is_right(text, total + MORE)
