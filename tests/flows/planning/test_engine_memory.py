"""The plan counts the engine that will generate, its weights in their format, and as many responses as it generates."""

from dataclasses import replace
from typing import Any

import pytest

from flows.planning import role_memory
from flows.planning.memory_plan import Gpus, fits, plan
from flows.planning.model_sizes import KNOWN
from flows.planning.plan_table import table
from tba.presets import preset

RHO = KNOWN["realtreetune/rho-1b-sft-GSM8K"]
SINGLE = Gpus.parse("1x80")
TRANSFORMERS = {"engine.name": "transformers"}


def engines(changes: dict[str, Any], *, has_vllm: bool | None) -> dict[str, str]:
    """Return the engine that is planned for each kind of role."""
    [gpu] = plan(preset("gsm8k").replace(changes), RHO, replace(SINGLE, has_vllm=has_vllm)).gpus
    return {
        load.role.partition("-")[0]: "vllm" if "vLLM" in load.parts else "transformers"
        for load in gpu.loads
        if load.role != "trainer"
    }


def test_rounded_weights_of_layers_take_one_byte_and_all_others_two():
    config = preset("gsm8k")
    rounded = config.replace({"engine.quantization": "fp8"})
    saved = role_memory.least_engine(config, RHO) - role_memory.least_engine(rounded, RHO)
    assert saved == RHO.layers * RHO.block
    assert role_memory.engine_weights(rounded, RHO) == RHO.layers * RHO.block + 2 * RHO.outside


@pytest.mark.parametrize(
    ("role", "changes", "rows"),
    [
        ("searcher", {}, 72),  # a round
        ("searcher", {"search.open_rounds": 4}, 288),
        ("searcher", {"search.open_rounds": 40}, 512),  # search.batch_responses
        ("searcher", {"search.value_samples": 2, "search.batch_responses": 300}, 300),
        ("evaluator", {"evaluation.prompts": 40}, 40),
        ("evaluator", {"evaluation.prompts": 40, "evaluation.samples": 5}, 200),
        ("evaluator", {}, 512),
    ],
    ids=str,
)
def test_the_cache_is_for_as_many_responses_as_a_role_generates_at_once(
    role: role_memory.Generating, changes: dict[str, Any], rows: int
):
    config = preset("gsm8k").replace({**TRANSFORMERS, **changes})
    parts = role_memory.engine(config, RHO, role, total=1e12, roles=1, vllm=False)
    assert parts["keys and values"] == role_memory.SPARE * rows * role_memory.cache(config, RHO)
    assert parts["logits"] == 3 * rows * RHO.vocabulary * 4


@pytest.mark.parametrize(
    ("changes", "has_vllm", "searcher", "evaluator"),
    [
        ({}, True, "vllm", "vllm"),
        ({}, None, "vllm", "vllm"),
        ({}, False, "transformers", "transformers"),
        (TRANSFORMERS, True, "transformers", "transformers"),
        ({"search.top_p": 0.9}, True, "transformers", "vllm"),
        ({"model.lora_rank": 8, "model.publish_dtype": "float32"}, True, "transformers", "transformers"),
    ],
    ids=str,
)
def test_the_engine_that_auto_chooses_is_planned(
    changes: dict[str, Any], has_vllm: bool | None, searcher: str, evaluator: str
):
    assert engines(changes, has_vllm=has_vllm) == {"searcher": searcher, "evaluator": evaluator}


def test_an_engine_that_cannot_serve_a_run_is_told_and_does_not_fit():
    config = preset("gsm8k").replace({"engine.name": "vllm", "search.top_p": 0.9})
    assert not fits(config, RHO, SINGLE)
    assert [line[:12] for line in table(config, RHO, SINGLE)] == ["engine.name:"]


def test_a_plan_says_whether_it_only_assumes_an_engine():
    def assumes(changes: dict[str, Any], has_vllm: bool | None) -> bool:
        lines = table(preset("gsm8k").replace(changes), RHO, replace(SINGLE, has_vllm=has_vllm))
        return any(line.startswith("engine.name=auto: planned with vLLM") for line in lines)

    assert assumes({}, None)
    assert not assumes({}, True) and not assumes({}, False)
    assert not assumes({"engine.name": "vllm"}, None) and not assumes(TRANSFORMERS, None)


def test_what_has_no_known_size_is_told():
    def left_out(name: str, changes: dict[str, Any]) -> list[str]:
        config = preset(name).replace(changes)
        return [line for line in table(config, RHO, SINGLE) if line.startswith("not counted: ")]

    assert left_out("gsm8k", {}) == left_out("tldr", {}) == left_out("redteam", {}) == []
    [said] = left_out("tldr", {"task.options.reward_model": "somebody/unheard-of"})
    assert said == "not counted: models of the task whose size is unknown on this machine: somebody/unheard-of"
    [said] = left_out("gsm8k", {"engine.name": "elsewhere:Engine"})
    assert said == "not counted: engines of elsewhere:Engine"
