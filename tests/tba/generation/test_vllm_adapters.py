"""Adapters in a running engine of vLLM, compared with the same adapters in transformers. All tests share a real
engine."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.tiny_models import tiny_tokenizer
from tba.config import VLLMEngine
from tba.errors import Busy, ConfigError, Damaged, Missing
from tba.generation.requests import generate
from tba.models.adapters import Adapter
from tba.models.policy import Policy, PolicyScorer
from tba.types import Prompt, Request, Response, Version
from tests.support.models.adapter_examples import adapter_of, moved
from tests.support.vllm import ON_CPU, SIMILAR, needs_vllm, served_folder

pytestmark = needs_vllm

V0, V1, V2 = Version(0, 1), Version(1, 1), Version(2, 1)
LONG, TEMPERATURE = 200, 0.7
TEXT = "what is it that you want? " * 8  # longer than a block of the key-value cache


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served_folder(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Version, Path]:
    root = tmp_path_factory.mktemp("versions")
    for seed, version in enumerate((V0, V1, V2)):
        moved(base, seed=seed).snapshot().save(root / str(version))
    return {version: root / str(version) for version in (V0, V1, V2)}


@pytest.fixture(scope="module")
def engine(base: Path) -> Iterator[Any]:
    from tba.generation.vllm_generator import VLLMGenerator

    generator = VLLMGenerator(
        on_cpu=ON_CPU,
        batch_responses=64,
        max_prompt_tokens=len(TEXT),
        max_response_tokens=LONG,
        engine=VLLMEngine(memory_fraction=0.2),
        adapter=adapter_of(base),
    )
    with closing(generator):
        yield generator


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    return Prompt(prompt_id="p", text=TEXT, tokens=tuple(tiny_tokenizer()(TEXT).input_ids))


def distance(adapter: Adapter, folder: Path, prompt: Prompt, responses: list[Response]) -> float:
    """Return the greatest difference, over all tokens, between stored log-probabilities and those of transformers."""
    policy = Policy.load_adapted(adapter, folder, device="cpu")
    [scored] = PolicyScorer(policy, V0).token_logps([prompt], [responses], temperature=TEMPERATURE)
    return max(
        abs(told - found)
        for response, logps in zip(responses, scored, strict=True)
        for told, found in zip(response.logps, logps, strict=True)
    )


def test_each_version_is_the_base_with_its_adapter_also_where_another_has_read_the_prompt(engine, folders, prompt):
    for version in (V0, V1, V0):
        engine.adopt(folders[version], version)
        [responses] = generate(engine, [prompt], [[1, 2, 3]], temperature=TEMPERATURE, limits=[8])
        assert {(it.version_start, it.version_end) for it in responses} == {(version, version)}
        assert distance(engine.adapter, folders[version], prompt, responses) < SIMILAR
        assert distance(engine.adapter, folders[V2], prompt, responses) > 0.1, "versions differ"


def test_what_is_in_flight_ends_with_the_adapter_that_it_began_with_beside_others(engine, folders, prompt):
    engine.adopt(folders[V0], V0)
    before, after = (
        [Request(prompt=prompt, seed=seed, limit=LONG, temperature=TEMPERATURE) for seed in range(first, first + 8)]
        for first in (0, 8)
    )
    engine.submit(before)
    found: dict[Request, Response] = dict(engine.step())
    engine.adopt(folders[V1], V1)
    engine.submit(after)
    with pytest.raises(Busy, match=f"version {V2} must wait"):
        engine.adopt(folders[V2], V2)
    while len(found) < len(before) + len(after):
        found |= dict(engine.step())
    for version, requests in ((V0, before), (V1, after)):
        responses = [found[it] for it in requests]
        assert {(it.version_start, it.version_end) for it in responses} == {(version, version)}
        assert distance(engine.adapter, folders[version], prompt, responses) < SIMILAR
    engine.adopt(folders[V2], V2)
    assert len(engine.requests.engine.list_loras()) == 1, "what nothing uses is given up"


def test_an_adapter_that_cannot_be_taken_leaves_the_one_before(engine, folders, prompt, tmp_path):
    engine.adopt(folders[V0], V0)
    with pytest.raises(Missing):
        engine.adopt(tmp_path / "gone", V1)
    moved(served_folder(tmp_path / "other", seed=1)).snapshot().save(tmp_path / "foreign")
    with pytest.raises(ConfigError, match="is for weights with sha256"):
        engine.adopt(tmp_path / "foreign", V1)
    (tmp_path / "foreign" / "adapter_model.safetensors").write_bytes(b"?")
    with pytest.raises(Damaged):
        engine.adopt(tmp_path / "foreign", V1)
    [responses] = generate(engine, [prompt], [[1, 2]], temperature=TEMPERATURE, limits=[8])
    assert engine.version == V0
    assert distance(engine.adapter, folders[V0], prompt, responses) < SIMILAR
