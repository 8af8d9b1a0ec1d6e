"""Prompts and responses of tiny policies."""

from benchmarks.harness.tiny_models import EOS_ID
from tba.types import Prompt, Response, Version


def prompt(*tokens: int) -> Prompt:
    return Prompt(prompt_id=str(tokens), text="", tokens=tokens)


def response(*tokens: int) -> Response:
    return Response(
        tokens=tokens,
        logps=(0.0,) * len(tokens),
        text="",
        finished=tokens[-1:] == (EOS_ID,),
        temperature=0.7,
        top_p=1.0,
        seed=0,
        version_start=Version(0, 1),
        version_end=Version(0, 1),
        generate_seconds=0.0,
    )
