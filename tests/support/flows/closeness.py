"""Compares the log-probabilities of two engines."""

from pathlib import Path
from typing import Any

from tba.models.policy import Policy, PolicyScorer
from tba.types import Prompt, Response, Version


def distance(folder: Path, rows: list[tuple[Any, ...]]) -> float:
    """Return the greatest difference, over all tokens, between stored log-probabilities and those of transformers."""
    prompts = [Prompt(prompt_id="", text="", tokens=tuple(row[3])) for row in rows]
    responses = [[response(tuple(row[4]))] for row in rows]
    scored = PolicyScorer(Policy.load(folder), Version(0, 1)).token_logps(prompts, responses, temperature=1.0)
    pairs = zip(rows, scored, strict=True)
    return max(abs(told - by) for row, [logps] in pairs for told, by in zip(row[5], logps, strict=True))


def response(tokens: tuple[int, ...]) -> Response:
    none = Version(0, 1)
    return Response(
        tokens=tokens, logps=(0.0,) * len(tokens), text="", finished=True, temperature=1.0, top_p=1.0, seed=0,
        version_start=none, version_end=none, generate_seconds=0.0,
    )  # fmt: skip
