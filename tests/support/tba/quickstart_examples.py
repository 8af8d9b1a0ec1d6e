"""Prompts and responses of quickstart."""

from benchmarks.harness.tiny_models import tiny_tokenizer
from tba.tasks.registry import get_task
from tba.types import Response, Version


def response(text: str, *, finished: bool = True) -> Response:
    v = Version(0, 1)
    return Response(
        tokens=(1,), logps=(0.0,), text=text, finished=finished, temperature=1.0, top_p=1.0, seed=0,
        version_start=v, version_end=v, generate_seconds=0.0,
    )  # fmt: skip


def prompts(split: str):
    return get_task("quickstart").prompts(split, [], tiny_tokenizer(), max_tokens=16)
