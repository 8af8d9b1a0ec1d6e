from typing import Any

import pytest

from benchmarks.science.lagged import HELD, lagged_run
from tba.errors import ConfigError
from tba.presets import preset

IN_STEP: dict[str, Any] = {"sync.every": 1, "sync.lag": 0}
OTHER = {
    "model.path": "gpt2",
    "model.dtype": "bfloat16",
    "model.publish_dtype": "bfloat16",
    "model.device": "cpu",
    "sampling.sql": "sampler.sql",
    "search.searchers": 2,
    "sync.every": 2,
}


@pytest.mark.parametrize(("name", "value"), [*OTHER.items(), ("sync.lag", None)])
def test_a_setting_that_would_be_without_effect_is_refused_by_its_name(name: str, value: Any):
    config = preset("quickstart").replace({**IN_STEP, name: value})
    with pytest.raises(ConfigError, match=rf"^{name} must be .* got {value!r}$"):
        next(lagged_run(config, scored_after=[1]))


def test_each_of_them_is_tried():
    assert OTHER.keys() == HELD.keys()
