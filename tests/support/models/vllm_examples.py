"""Prompts for vLLM."""

from tba.types import Prompt
from tests.support.models.tiny import tiny_tokenizer


def prompts_of(texts: list[str]) -> list[Prompt]:
    tokenizer = tiny_tokenizer()
    return [Prompt(prompt_id=text, text=text, tokens=tuple(tokenizer(text).input_ids)) for text in texts]
