"""Engines of vLLM with each profile. On a GPU, also with each optimisation alone, so that a fault shows which one has
it."""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tba.errors import ConfigError
from tba.generation.requests import generate
from tba.generation.vllm_profiles import MODEL_RUNNER, PLAIN
from tests.support.devices import needs_gpu
from tests.support.models.vllm_examples import LIMITS, PROMPTS, SEEDS, V0, V1, distance, make_generator, version_folders
from tests.support.vllm import ON_CPU, SIMILAR, needs_vllm

pytestmark = needs_vllm
AS_SAFE = {"model_runner": 1, "async_scheduling": False, "compilation": "NONE", "cuda_graphs": "NONE"}
IN_16_BITS = 2.0
"""Most that a log-probability in bfloat16 differs from the one in float32, by a random model. On a CPU it was 0.9."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Path]:
    return version_folders(tmp_path_factory.mktemp("versions"))


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove what an engine leaves in the environment of its role."""
    with monkeypatch.context() as patch:
        patch.setenv(MODEL_RUNNER, "")  # so that it is as before after the test
        del os.environ[MODEL_RUNNER]
        yield


def served(folders: dict[Any, Path], most: float = SIMILAR, *, options: Any = None, **engine: Any) -> dict[str, Any]:
    """Start an engine, and load another version into it. Check that its log-probabilities are those of each version.
    Return what vLLM has made of its arguments."""
    told: list[dict[str, Any]] = []
    options = {**(options or {}), "tell": lambda roles, resolved: told.append(dict(resolved))}
    with closing(make_generator(options=options, **engine)) as generator:
        for version, other in ((V0, V1), (V1, V0)):
            generator.adopt(folders[version], version)
            groups = generate(generator, PROMPTS, SEEDS, temperature=1.0, limits=LIMITS)
            off = distance(folders[version], PROMPTS, groups, temperature=1.0)
            assert off < most and off < distance(folders[other], PROMPTS, groups, temperature=1.0)
    (resolved,) = told
    return resolved


def test_an_engine_of_the_safe_profile_uses_no_optimisation(folders: dict[Any, Path]):
    assert AS_SAFE.items() <= served(folders, profile="safe").items()


@pytest.mark.parametrize(
    "switch",
    [
        {"first_runner": False},
        {"async_scheduling": True},
        {"compiled": True},
        {"cuda_graphs": True},
    ],
    ids=lambda switch: next(iter(switch)),
)
@pytest.mark.parametrize("on", [pytest.param("gpu", marks=needs_gpu)])
def test_each_optimisation_alone_leaves_the_log_probabilities_as_they_are(
    folders: dict[Any, Path], switch: dict[str, bool], on: str
):
    resolved = served(folders, options={"switches": PLAIN._replace(**switch)})
    changed = {name for name, value in AS_SAFE.items() if resolved[name] != value}
    (name,) = switch
    expected = {"first_runner": "model_runner", "compiled": "compilation"}
    assert changed == {expected.get(name, name)}


@pytest.mark.parametrize("profile", [pytest.param("default", marks=needs_gpu), "fast"])
def test_an_engine_of_a_faster_profile_has_the_same_log_probabilities(folders: dict[Any, Path], profile: str):
    resolved = served(folders, profile=profile)
    if ON_CPU:  # where vLLM has none of them
        assert AS_SAFE.items() <= resolved.items()
    else:
        assert not AS_SAFE.items() & resolved.items()


@pytest.mark.parametrize("on", [pytest.param("gpu", marks=needs_gpu)])
def test_weights_of_each_version_are_rounded_to_8_bits(folders: dict[Any, Path], on: str):
    resolved = served(folders, IN_16_BITS, options={"dtype": "bfloat16"}, profile="safe", quantization="fp8")
    assert resolved["quantization"] == "fp8_per_channel"


@pytest.mark.skipif(not ON_CPU, reason="a GPU may round weights")
def test_on_a_cpu_an_engine_with_rounded_weights_does_not_start(folders: dict[Any, Path]):
    fault = pytest.raises(ConfigError, match=r"engine\.name: vLLM cannot serve this model with these settings")
    with closing(make_generator(options={"dtype": "float32"}, quantization="fp8")) as generator, fault:
        generator.adopt(folders[V0], V0)
