import pytest

from tba.config import PRESETS, Config, parse, preset
from tba.errors import ConfigError


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_the_round_trip_through_json_shaped_data(name):
    assert parse(preset(name).to_dict()) == preset(name)


def test_presets_carry_the_numbers_of_the_paper():
    gsm8k, tldr, math, redteam = (preset(name) for name in ("gsm8k", "tldr", "math", "redteam"))
    assert (gsm8k.batch, tldr.batch, math.batch, redteam.batch) == (140, 160, 512, 128)
    assert [c.sync.every for c in (gsm8k, tldr, redteam)] == [2, 10, 10]
    assert [c.sampling.recent_share for c in (gsm8k, tldr, redteam)] == [0.95, 0.5, 0.5]
    assert (gsm8k.search.responses_per_prompt, tldr.search.responses_per_prompt) == (24, 20)
    assert (gsm8k.search.temperature, tldr.search.temperature, math.search.temperature) == (0.7, 0.7, 1.0)
    assert (gsm8k.sampling.inv_temp, tldr.sampling.inv_temp) == (0, 1)
    assert (gsm8k.objective.beta_start, gsm8k.objective.beta_end) == (0.012, 0.004)
    assert (gsm8k.search.initial_fill, tldr.search.initial_fill) == (500, 10_000)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"training.stepz": 1}, "'training.stepz'"),
        ({"trainin.steps": 1}, "'trainin'"),
        ({"task": {"nmae": "x"}}, "unknown setting 'task.nmae'"),
        ({"training.steps": 0}, "training.steps"),
        ({"training.steps": "many"}, "got 'many'"),
        ({"training.responses_per_prompt": 1}, "training.responses_per_prompt"),
        (
            {"search.responses_per_prompt": 4},
            "search.responses_per_prompt (S) must be >= training.responses_per_prompt",
        ),
        ({"sampling.recent_share": 1.5}, "sampling.recent_share"),
        ({"sampling.capacity": 2}, "sampling.capacity must be >= training.responses_per_prompt"),
        ({"search.temperature": 0}, "search.temperature"),
        ({"objective.beta_start": float("nan")}, "objective.beta_start"),
        (
            {"objective.beta_stop": 9, "objective.beta_target": 3},
            "objective.beta_stop must be <= objective.beta_target",
        ),
        ({"training.warmup_steps": 0, "training.stable_steps": 0, "training.decay_steps": 0}, "training.schedule"),
        ({"sync.every": 10_000}, "sync.every must be <= training.steps"),
        ({"limits.silent_after": 1.0}, "limits.silent_after"),
        ({"model.dtype": "float16"}, "model.dtype"),
        ({"seed": -1}, "seed"),
    ],
)
def test_a_bad_setting_is_refused_by_name(change, says):
    with pytest.raises(ConfigError) as refused:
        preset("quickstart").replace(change)
    assert says in str(refused.value)


def test_an_unknown_preset_names_the_known_ones():
    with pytest.raises(ConfigError, match="known: quickstart, gsm8k, math, tldr, redteam"):
        preset("gsm9k")


def test_a_change_leaves_the_original_alone():
    before = preset("quickstart")
    after = before.replace({"training.steps": 7, "sync.every": 7}, seed=3)
    assert (after.training.steps, after.seed, before.seed) == (7, 3, 0)
    assert before == preset("quickstart")


def test_the_last_sync_follows_the_last_step_whatever_the_period():
    config = Config().replace({"training.steps": 256, "sync.every": 10})
    assert config.last_sync == 26
    assert [config.step_of_sync(n) for n in (0, 1, 25, 26)] == [0, 10, 250, 256]


def test_recent_ages_are_those_of_the_paper():
    assert preset("gsm8k").recent_ages == (2, 3, 2.5)
    assert preset("tldr").recent_ages == (10, 19, 14.5)
