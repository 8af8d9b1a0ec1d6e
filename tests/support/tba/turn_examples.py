"""A task and a generator for several turns."""

from collections.abc import Mapping, Sequence
from typing import Any

from tba.config import TaskConfig
from tba.types import Prompt, Response, Reward

CHARACTERS = "01?="


class Echo:
    """Answers each turn with the turn itself, and ends at an empty turn or the third. Rewards ones in the last turn."""

    name = "echo"

    def __init__(self, config: TaskConfig | None = None):
        pass

    def source(self, split: str) -> str:
        return ""

    def prompts(
        self, split: str, rows: Sequence[Mapping[str, Any]], tokenizer: Any, *, max_tokens: int
    ) -> list[Prompt]:
        return [
            Prompt(prompt_id=f"{split}-{text}", text=text, tokens=tuple(tokenizer(text).input_ids))
            for text in ("0?", "1?", "00?", "01?", "10?", "11?", "000?", "001?")
        ]

    def reply(self, prompt: Prompt, turns: Sequence[str], tokenizer: Any) -> Sequence[int] | None:
        if not turns[-1] or len(turns) == 5:
            return None
        return tokenizer(f"?{turns[-1]}=", add_special_tokens=False).input_ids

    def reward(self, prompt: Prompt, response: Response) -> Reward:
        return Reward(value=float(response.turns[-1].count("1") > 0))
