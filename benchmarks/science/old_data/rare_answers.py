"""Two numbers with a given sum, where only rare answers are right: a task that shows what more searchers find.

The base policy is that of `ManyAnswers`. An answer to "347=" earns the reward if its first number is a multiple of ten
and its second number is 21 too large, as in "001+466": 100 + 664 is 743 + 21. The base policy has seen such mistakes
rarely: their probability is a few hundred-thousandths. Under the exact target at a beta of 0.05 it is above 0.99. All
such answers are known, so coverage and the exact target are too.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.science.old_data.many_answers import ManyAnswers, is_right, right_answers
from tba.types import Prompt, Response, Reward

TRAIN_PROMPTS, MORE = 32, 21


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
