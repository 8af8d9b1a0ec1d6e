"""Responses whose states have values."""

from collections.abc import Sequence

from benchmarks.harness.tiny_models import tiny_tokenizer

CHARACTERS = "01?="
TOKENIZER = tiny_tokenizer(CHARACTERS)


def text_of(tokens: Sequence[int]) -> str:
    return str(TOKENIZER.decode(tokens, skip_special_tokens=True))
