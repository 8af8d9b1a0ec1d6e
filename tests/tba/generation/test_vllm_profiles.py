"""Each profile switches on the optimisations that its name promises. vLLM itself is not needed here."""

from typing import Any

import pytest

from tba.config import VLLMEngine
from tba.generation.vllm_profiles import MODEL_RUNNER, PLAIN, PROFILES, Switches, switch_arguments, switch_variables

GRAPHS, LARGER_GRAPHS = "max_cudagraph_capture_size", 600


def arguments(switches: Switches, *, on_cpu: bool = False, **engine: Any) -> dict[str, Any]:
    return switch_arguments(switches, VLLMEngine(**engine), on_cpu=on_cpu, batch_responses=LARGER_GRAPHS)


def test_the_safe_profile_switches_everything_off():
    assert arguments(PROFILES["safe"]) == {"async_scheduling": False, "enforce_eager": True}
    assert switch_variables(PROFILES["safe"]) == {MODEL_RUNNER: "0"}


def test_the_default_profile_leaves_every_choice_to_vllm():
    assert arguments(PROFILES["default"]) == {"async_scheduling": None, "enforce_eager": False}
    assert switch_variables(PROFILES["default"]) == {}


def test_the_fast_profile_asks_for_more_than_vllm_does_by_itself():
    graphs = {"compilation_config": {GRAPHS: LARGER_GRAPHS}}
    assert arguments(PROFILES["fast"]) == {"async_scheduling": True, "enforce_eager": False, **graphs}
    assert PROFILES["fast"].batched_tokens > PROFILES["default"].batched_tokens


def test_compilation_and_graphs_can_be_switched_on_one_at_a_time():
    compiled, recorded = PLAIN._replace(compiled=True), PLAIN._replace(cuda_graphs=True)
    assert arguments(compiled)["compilation_config"] == {"cudagraph_mode": "NONE"}
    assert arguments(recorded)["compilation_config"] == {"mode": 0}
    assert not arguments(compiled)["enforce_eager"] and not arguments(recorded)["enforce_eager"]


@pytest.mark.parametrize("profile", PROFILES)
def test_on_a_cpu_nothing_is_compiled(profile: str):
    on_cpu = arguments(PROFILES[profile], on_cpu=True)
    assert on_cpu["enforce_eager"] and "compilation_config" not in on_cpu


def test_weights_are_rounded_only_if_a_setting_says_so():
    assert all("quantization" not in arguments(switches) for switches in PROFILES.values())
    assert arguments(PROFILES["safe"], quantization="fp8")["quantization"] == "fp8_per_channel"
