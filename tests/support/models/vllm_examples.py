"""Prompts, versions and generators for vLLM."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from benchmarks.harness.tiny_models import tiny_tokenizer
from tba.config import VLLMEngine
from tba.models.policy import Policy, PolicyScorer
from tba.types import Prompt, Response, Version
from tests.support.vllm import ON_CPU, served_folder

V0, V1, V2 = Version(0, 1), Version(1, 1), Version(2, 2)
LIMIT, LONG, MOST = 24, 400, 1024
TEXTS = ["1+2=", "what is it that you want?", "z", "hello", "7" * 150]


def prompts_of(texts: list[str]) -> list[Prompt]:
    tokenizer = tiny_tokenizer()
    return [Prompt(prompt_id=text, text=text, tokens=tuple(tokenizer(text).input_ids)) for text in texts]


PROMPTS = prompts_of(TEXTS)
SEEDS = [[100 * i + j for j in range(6)] for i in range(len(PROMPTS))]
LIMITS = [LIMIT] * len(PROMPTS)


def version_folders(root: Path) -> dict[Version, Path]:
    """Make folders of versions with different weights."""
    return {version: served_folder(root / str(version), seed=seed) for seed, version in enumerate((V0, V1, V2))}


def make_generator(*, options: Mapping[str, Any] = MappingProxyType({}), **engine: Any) -> Any:
    from tba.generation.vllm_generator import VLLMGenerator

    return VLLMGenerator(
        **options,
        on_cpu=ON_CPU,
        batch_responses=64,
        max_prompt_tokens=MOST - LONG,
        max_response_tokens=LONG,
        engine=VLLMEngine(memory_fraction=0.2, **engine),  # a GPU has room for three engines
    )


def distance(folder: Path, prompts: list[Prompt], groups: list[list[Response]], *, temperature: float) -> float:
    """Return the greatest difference, over all tokens, between stored log-probabilities and those of transformers."""
    expected = PolicyScorer(Policy.load(folder), V0).token_logps(prompts, groups, temperature=temperature)
    return max(
        abs(told - found)
        for group, scored in zip(groups, expected, strict=True)
        for response, logps in zip(group, scored, strict=True)
        for told, found in zip(response.logps, logps, strict=True)
    )


def before_next(patch: pytest.MonkeyPatch, of: Any, method: str, do: Callable[[], object]) -> None:
    """Do something before a method is called the next time."""
    call = getattr(of, method)

    def both(*arguments: Any) -> Any:
        patch.setattr(of, method, call)
        do()
        return call(*arguments)

    patch.setattr(of, method, both)
