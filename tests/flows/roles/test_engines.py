"""Which engine is chosen, and for which reason. vLLM itself is never loaded here."""

from typing import Any

import pytest

from flows.planning import resolve, role_memory
from flows.planning.describe import describe
from flows.planning.model_sizes import KNOWN
from flows.roles.engines import LEAST_PARAMETERS, choose, evaluation_sampling, search_sampling
from tba.config import Config
from tba.errors import ConfigError
from tba.presets import preset


def settings(changes: dict[str, Any]) -> Config:
    return preset("gsm8k").replace({name.replace("__", "."): value for name, value in changes.items()})


def chosen(device: str = "cuda", *, installed: bool = True, parameters: int = 10**6, **changes: Any) -> tuple[str, str]:
    """Return the name of the engine for a searcher, and the reason for the choice."""
    config = settings(changes)
    return tuple(choose(config, search_sampling(config), device=device, installed=installed, parameters=parameters))


def test_the_default_is_vllm_on_a_gpu_if_it_is_installed_and_transformers_otherwise():
    assert chosen()[0] == "vllm"
    name, why = chosen(installed=False)
    assert name == "transformers" and "not installed" in why
    name, why = chosen("cpu", parameters=LEAST_PARAMETERS - 1)
    assert name == "transformers" and "CPU" in why


def test_on_a_cpu_the_default_is_vllm_for_large_models():
    assert chosen("cpu", parameters=LEAST_PARAMETERS)[0] == "vllm"
    assert chosen("cpu", parameters=LEAST_PARAMETERS, installed=False)[0] == "transformers"
    assert chosen("mps", parameters=LEAST_PARAMETERS)[0] == "transformers"


def test_the_engine_that_the_settings_name_is_chosen_on_any_device():
    assert chosen("cpu", engine__name="vllm")[0] == "vllm"
    assert chosen(engine__name="transformers")[0] == "transformers"


def test_vllm_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"engine\.name: vLLM is not installed here .*'vllm'"):
        chosen("cpu", installed=False, engine__name="vllm")


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ({"installed": False}, "not installed"),
        ({"device": "cpu"}, "on a CPU"),
        ({"search__temperature": 0.005}, "at least 0.01"),
    ],
)
def test_a_model_that_is_to_be_spread_over_gpus_is_never_left_to_transformers(where: dict[str, Any], why: str):
    assert chosen(engine__tensor_parallel=2)[0] == "vllm"
    with pytest.raises(ConfigError, match=rf"engine\.tensor_parallel: .*{why}.*, got 2"):
        chosen(**where, engine__tensor_parallel=2)


@pytest.mark.parametrize("setting", ["search.top_p", "search.explore_top_p"])
def test_sampling_with_other_log_probabilities_in_vllm_is_left_to_transformers_or_refused(setting: str):
    changes = {"search__temperature": 0.7, "search__explore_share": 0.5, setting.replace(".", "__"): 0.9}
    name, why = chosen(**changes)
    assert name == "transformers" and f"{setting}=0.9" in why
    with pytest.raises(ConfigError, match=rf"{setting}=0\.9, got 'vllm'"):
        chosen(**changes, engine__name="vllm")


@pytest.mark.parametrize(
    "changes",
    [
        {"search__temperature": 0.005},
        {"search__explore_share": 0.5, "search__explore_temperature": [0.005, 1]},
    ],
)
def test_temperatures_that_vllm_would_raise_are_left_to_transformers_or_refused(changes: dict[str, Any]):
    name, why = chosen(**changes)
    assert name == "transformers" and "at least 0.01, but 0.005 is needed" in why
    with pytest.raises(ConfigError, match=r"engine\.name: .*0\.005"):
        chosen(**changes, engine__name="vllm")


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"search__temperature": 2.5}, "2.5"),
        ({"search__temperature": 1.4, "search__explore_share": 0.5, "search__explore_top_p": 1}, "2.2"),
        ({"search__explore_share": 0.5, "search__explore_temperature": [0.5, 3]}, "3"),
    ],
)
def test_temperatures_that_vllm_refuses_are_left_to_transformers_or_refused(changes: dict[str, Any], found: str):
    name, why = chosen(**changes)
    assert name == "transformers" and f"at most 2, but {found} is needed" in why
    with pytest.raises(ConfigError, match=rf"engine\.name: .*{found}"):
        chosen(**changes, engine__name="vllm")
    warmest = {"search__temperature": 1.2, "search__explore_share": 0.5, "search__explore_top_p": 1}
    assert chosen(**warmest, engine__name="vllm")[0] == "vllm"


def test_what_vllm_cannot_do_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch):
    for setting in ("search.temperature", "evaluation.temperature"):
        wanted = {"engine.name": "vllm", "evaluation.samples": 2, setting: 2.5}
        with pytest.raises(ConfigError, match=r"engine\.name: .*at most 2"):
            resolve.resolve("quickstart", wanted, runs_here=False)
    monkeypatch.setattr(resolve, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"engine\.name: vLLM is not installed here"):
        resolve.resolve("quickstart", {"engine.name": "vllm"})
    assert resolve.resolve("quickstart", {"engine.name": "vllm"}, runs_here=False).engine.name == "vllm"


ADAPTERS = {"model.lora_rank": 16, "model.dtype": "float32", "model.publish_dtype": "float32"}
IN_16_BITS = {**ADAPTERS, "model.dtype": "bfloat16", "model.publish_dtype": "bfloat16"}


def test_adapters_in_float32_are_left_to_transformers_on_a_gpu_or_refused():
    """vLLM's Triton kernels for adapters assert 16 bits, in the first batch."""
    name, why = chosen(**ADAPTERS)
    assert name == "transformers" and "model.dtype=bfloat16 model.publish_dtype=bfloat16 lets vLLM serve them" in why
    with pytest.raises(
        ConfigError, match=r"^engine\.name: vLLM's kernels for adapters .*model\.dtype=bfloat16 .*'vllm'$"
    ):
        chosen(**ADAPTERS, engine__name="vllm")
    with pytest.raises(ConfigError, match=r"^engine\.tensor_parallel: .*model\.dtype=bfloat16 .*, got 2$"):
        chosen(**ADAPTERS, engine__tensor_parallel=2)
    assert chosen(**IN_16_BITS)[0] == "vllm"
    assert chosen("cpu", **ADAPTERS, engine__name="vllm")[0] == "vllm"


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_adapters_in_float32_are_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch, device: str):
    monkeypatch.setattr(resolve, "find_spec", lambda name: object())
    monkeypatch.setattr(resolve, "usable", lambda config, *counts: ["GPU-0"])
    wanted = {**ADAPTERS, "engine.name": "vllm", "model.device": device}
    with pytest.raises(ConfigError, match=r"engine\.name: vLLM's kernels for adapters"):
        resolve.resolve("quickstart", wanted)
    assert resolve.resolve("quickstart", {**wanted, **IN_16_BITS}).engine.name == "vllm"
    assert resolve.resolve("quickstart", {**wanted, "model.device": "cpu"}).engine.name == "vllm"


def test_the_plan_and_the_description_of_a_run_know_that_transformers_serves_adapters_in_float32():
    config = preset("gsm8k").replace(ADAPTERS)
    note = "on a GPU responses come from transformers, which is slower"
    assert note in describe(config) and note not in describe(config.replace(IN_16_BITS))
    fits_kernels = config.replace(IN_16_BITS)
    assert not role_memory.uses_vllm(config, "searcher") and role_memory.uses_vllm(fits_kernels, "searcher")
    model = KNOWN["realtreetune/rho-1b-sft-GSM8K"]
    for it, parts in ((config, {"policy", "keys and values"}), (fits_kernels, {"vLLM"})):
        vllm = role_memory.uses_vllm(it, "searcher")
        assert parts <= set(role_memory.searcher(it, model, total=80 * 2**30, roles=1, vllm=vllm))


def test_rounded_weights_are_refused_wherever_the_engine_would_not_round_them(monkeypatch: pytest.MonkeyPatch):
    rounded = {"engine.quantization": "fp8", "model.publish_dtype": "bfloat16"}
    assert chosen(**rounded)[0] == "vllm"
    for name in ("auto", "vllm"):
        with pytest.raises(ConfigError, match=r"^engine\.quantization needs an NVIDIA GPU, .* on cpu, got 'fp8'$"):
            chosen("cpu", **rounded, engine__name=name, parameters=LEAST_PARAMETERS)
    with pytest.raises(ConfigError, match=r"^engine\.quantization: only vLLM .* not installed here .*, got 'fp8'$"):
        chosen(**rounded, installed=False)
    monkeypatch.setattr(resolve, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match=r"engine\.quantization needs an NVIDIA GPU"):
        resolve.resolve("quickstart", {**rounded, "model.device": "cpu"})
    assert resolve.resolve("quickstart", rounded, runs_here=False).model.publish_dtype == "bfloat16"


def test_at_temperature_1_vllm_has_the_right_log_probabilities_for_any_top_p():
    assert chosen(search__temperature=1.0, search__top_p=0.9)[0] == "vllm"
    assert chosen(search__temperature=1.0, search__top_p=0.9, search__explore_share=0.1)[0] == "transformers"


def test_an_evaluator_uses_vllm_with_any_top_p_unless_its_task_reads_log_probabilities():
    config = settings({"evaluation__samples": 2, "evaluation__temperature": 0.6, "evaluation__top_p": 0.95})

    def evaluators(config: Config, *, reads_logps: bool) -> tuple[str, str]:
        sampling = evaluation_sampling(config, reads_logps=reads_logps)
        return tuple(choose(config, sampling, device="cuda", installed=True))

    assert evaluators(config, reads_logps=False)[0] == "vllm"
    name, why = evaluators(config, reads_logps=True)
    assert name == "transformers" and "evaluation.top_p=0.95" in why
    assert evaluators(config.replace({"evaluation.temperature": 1.0}), reads_logps=True)[0] == "vllm"
    name, why = evaluators(config.replace({"evaluation.temperature": 0.005}), reads_logps=False)
    assert name == "transformers" and "but 0.005 is needed" in why
