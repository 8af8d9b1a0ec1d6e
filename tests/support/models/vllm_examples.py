"""Prompts for vLLM."""

from benchmarks.harness.tiny_models import tiny_tokenizer
from tba.types import Prompt


def prompts_of(texts: list[str]) -> list[Prompt]:
    tokenizer = tiny_tokenizer()
    return [Prompt(prompt_id=text, text=text, tokens=tuple(tokenizer(text).input_ids)) for text in texts]
