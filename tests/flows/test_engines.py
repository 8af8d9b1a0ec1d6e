"""Which engine is chosen, and why; vLLM itself has no part in this."""

from typing import Any

import pytest

from flows.engines import choose, samples_at_one
from tba.errors import ConfigError
from tba.presets import preset


def chosen(device: str = "cuda", *, installed: bool = True, **changes: Any) -> tuple[str, str]:
    config = preset("gsm8k").replace({name.replace("__", "."): value for name, value in changes.items()})
    return tuple(choose(config, device=device, installed=installed))


def test_of_itself_it_is_vllm_on_a_gpu_where_it_is_installed_and_transformers_elsewhere():
    assert chosen()[0] == "vllm"
    name, why = chosen(installed=False)
    assert name == "transformers" and "not installed" in why
    name, why = chosen("cpu")
    assert name == "transformers" and "CPU" in why


def test_what_the_settings_name_is_taken_on_any_device():
    assert chosen("cpu", engine__name="vllm")[0] == "vllm"
    assert chosen(engine__name="transformers")[0] == "transformers"


def test_vllm_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"engine\.name: vLLM is not installed here .*'vllm'"):
        chosen("cpu", installed=False, engine__name="vllm")


CUTS = [
    {"search__top_p": 0.9},
    {"search__explore_share": 0.5, "search__explore_top_p": 0.9},
    {"evaluation__samples": 2, "evaluation__top_p": 0.9},
]


@pytest.mark.parametrize("changes", CUTS)
def test_what_would_give_other_log_probabilities_is_left_to_transformers_or_refused(changes: dict[str, Any]):
    changes = {"search__temperature": 0.7, **changes}
    name, why = chosen(**changes)
    setting = next(name for name in changes if name.endswith("top_p")).replace("__", ".")
    assert name == "transformers" and f"{setting}=0.9" in why
    with pytest.raises(ConfigError, match=setting):
        chosen(**changes, engine__name="vllm")


@pytest.mark.parametrize(
    "changes",
    [
        {"search__temperature": 0.005},
        {"evaluation__samples": 2, "evaluation__temperature": 0.005},
        {"search__explore_share": 0.5, "search__explore_temperature": [0.005, 1]},
    ],
)
def test_temperatures_that_vllm_would_raise_are_left_to_transformers_or_refused(changes: dict[str, Any]):
    name, why = chosen(**changes)
    assert name == "transformers" and "at least 0.01, and this run at 0.005" in why
    with pytest.raises(ConfigError, match=r"engine\.name: .*0\.005"):
        chosen(**changes, engine__name="vllm")


def test_at_temperature_1_vllm_tells_them_whatever_top_p_is():
    assert chosen(search__temperature=1.0, search__top_p=0.9)[0] == "vllm"
    config = preset("gsm8k").replace({"search.temperature": 1.0})
    assert samples_at_one(config)
    for other in (
        {"search.temperature": 0.9},
        {"search.explore_share": 0.5},
        {"evaluation.samples": 2, "evaluation.temperature": 0.5},
    ):
        assert not samples_at_one(config.replace(other))
