"""The sections `objective` and `engine`, whose settings depend on a name, also as older runs stored them."""

import json
from typing import Any

import pytest

from tba.config import Config, CustomEngine, TransformersEngine, VLLMEngine, parse, parse_known
from tba.errors import ConfigError
from tba.objectives import OBJECTIVES
from tba.objectives.policy_gradients.grpo import GRPO, DrGRPO
from tba.objectives.policy_gradients.rloo import RLOO
from tba.presets import preset

OLD_OBJECTIVE = {
    "name": "trajectory-balance", "beta_start": 0.05, "beta_end": 0.05, "beta_target": 1, "beta_stop": 1,
    "target_temperature_start": 1.0, "target_temperature_steps": 1, "reference_temperature_end": 1.0,
    "reference_temperature_steps": 1, "include_eos": True, "reference_reset": 0, "reset_optimizer": False,
    "reference_decay": 0.0, "log_z": "group", "log_z_learning_rate": 0.001, "correction": "own",
    "correction_level": "own", "clip_low": 0.2, "clip_high": 0.2, "ratio_cap": 8.0, "prox_share": 0.5,
    "normaliser": "own", "penalty": "own", "centre": "policy", "anchor": "own", "value_beta": 0.0, "discount": 1.0,
    "gae_decay": 0.95, "value_share": 0.1, "value_learning_rate": 0.0,
}  # fmt: skip
"""The section `objective` as runs stored it when one class held the settings of all objectives."""


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_objective_of_an_older_run_is_read_with_the_values_that_it_ran_with(name: str):
    older = {**Config().to_dict(), "objective": {**OLD_OBJECTIVE, "name": name}}
    values = {"vine-ppo": {"search": {**older["search"], "value_samples": 4}}}.get(name, {})
    assert parse({**older, **values}).objective == OBJECTIVES[name]()
    assert parse_known({**older, **values}).objective == OBJECTIVES[name]()


def test_what_an_older_run_had_chosen_stays():
    chosen = {"name": "dr-grpo", "correction": "truncate", "ratio_cap": 2.0, "penalty": "loss", "beta_start": 0.1,
              "beta_end": 0.1}  # fmt: skip
    objective = parse({"objective": {**OLD_OBJECTIVE, **chosen}}).objective
    assert objective == DrGRPO(correction="truncate", ratio_cap=2.0, penalty="loss", beta_start=0.1, beta_end=0.1)
    with pytest.raises(ConfigError, match=r"objective\.ratio_cap does not apply to 'kimi', got 2\.0"):
        parse({"objective": {**OLD_OBJECTIVE, **chosen, "name": "kimi"}})


def test_the_engine_of_an_older_run_is_read():
    older = {"name": "transformers", "memory_fraction": None, "cache_gigabytes": None, "tensor_parallel": 1,
             "in_flight": "update", "compile": True}  # fmt: skip
    assert parse({"engine": older}).engine == TransformersEngine(in_flight="update")
    assert parse({"engine": {**older, "name": "vllm"}}).engine == VLLMEngine(name="vllm", in_flight="update")
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel does not apply to 'transformers', got 2"):
        parse({"engine": {**older, "tensor_parallel": 2}})


def test_another_objective_keeps_what_was_chosen_and_brings_its_own_defaults():
    rloo = preset("quickstart").replace({"objective.name": "rloo", "objective.reference_reset": 9})
    assert rloo.objective == RLOO(reference_reset=9)
    grpo = rloo.replace({"objective.name": "grpo"})
    assert grpo.objective == GRPO(reference_reset=9), "a penalty that RLOO had by default is GRPO's own again"
    loss = rloo.replace({"objective.penalty": "none"}).replace({"objective.name": "grpo"})
    assert loss.objective == GRPO(reference_reset=9, penalty="none")
    both = grpo.replace({"objective": {"name": "rloo", "correction": "cap"}})
    assert both.objective == RLOO(reference_reset=9, correction="cap")
    assert both.replace({"objective.name": "rloo"}) == both
    capped = preset("math").replace({"objective.ratio_cap": 3})
    with pytest.raises(ConfigError, match=r"objective\.ratio_cap does not apply to 'online-dpo', got 3"):
        capped.replace({"objective.name": "online-dpo"})


def test_an_engine_of_ones_own_is_named_by_its_path_and_has_options():
    changes = {"engine.name": "package.module:Class", "engine.options": {"url": "http://localhost"}}
    config = preset("quickstart").replace(changes)
    assert config.engine == CustomEngine(name="package.module:Class", options={"url": "http://localhost"})
    assert parse(json.loads(json.dumps(config.to_dict()))) == config
    plain = preset("quickstart").replace({"engine.name": "package.module:Class"})
    assert plain.engine == CustomEngine(name="package.module:Class")
    assert plain.replace({"engine.name": "transformers"}).engine == TransformersEngine()
    with pytest.raises(
        ConfigError, match=r"engine\.name must be one of 'auto', .* or the path of a class, got 'sglang'"
    ):
        preset("quickstart").replace({"engine.name": "sglang"})
    with pytest.raises(ConfigError, match=r"engine\.name must match pattern .*, got 'package:a:b'"):
        preset("quickstart").replace({"engine.name": "package:a:b"})


def test_a_setting_that_the_new_choice_lacks_can_be_set_back():
    grpo = Config().replace({"objective.name": "grpo", "objective.correction": "none"})
    with pytest.raises(ConfigError, match=r"objective\.correction does not apply to 'trajectory-balance', got 'none'"):
        grpo.replace({"objective.name": "trajectory-balance"})
    back = grpo.replace({"objective.name": "trajectory-balance", "objective.correction": "clip"})
    assert back == Config()


def test_text_that_means_the_former_default_is_as_good_as_none():
    """`--set` passes every value as text."""
    changes = {"objective.name": "grpo", "objective.target_temperature_start": "1",
               "objective.target_temperature_steps": "1", "objective.log_z": "group"}  # fmt: skip
    assert preset("redteam").replace(changes).objective == GRPO()
    assert Config().replace({"engine.name": "transformers", "engine.profile": "default"}).engine == TransformersEngine()
    with pytest.raises(ConfigError, match=r"engine\.profile does not apply to 'transformers', got 'safe'"):
        Config().replace({"engine.name": "transformers", "engine.profile": "safe"})


# --- engine.compile, which engine.profile has replaced ---


@pytest.mark.parametrize(
    ("compiles", "profile"), [(True, "default"), (False, "safe"), ("true", "default"), ("false", "safe")]
)
def test_a_stored_run_and_a_change_may_say_compile_instead_of_profile(compiles: Any, profile: str):
    stored = {"engine": {"name": "vllm", "compile": compiles, "tensor_parallel": 2}}
    assert (
        parse(stored).engine
        == parse_known(stored).engine
        == VLLMEngine(name="vllm", tensor_parallel=2, profile=profile)
    )
    assert Config().replace({"engine.compile": compiles}).engine == VLLMEngine(profile=profile)
    assert Config().replace({"engine": {"compile": compiles}}).engine == VLLMEngine(profile=profile)


def test_an_engine_without_profiles_may_have_stored_that_it_compiles():
    assert parse({"engine": {"name": "transformers", "compile": True}}).engine == TransformersEngine()
    with pytest.raises(ConfigError, match=r"engine\.profile does not apply to 'transformers', got 'safe'"):
        parse({"engine": {"name": "transformers", "compile": False}})


def test_a_compile_that_contradicts_the_profile_or_means_nothing_is_refused():
    for engine in ({"profile": "fast", "compile": False}, {"compile": "perhaps"}):
        with pytest.raises(ConfigError, match=r"unknown setting 'engine\.compile'"):
            parse({"engine": engine})
    with pytest.raises(ConfigError, match=r"unknown setting 'engine\.compile'"):
        Config().replace({"engine.compile": "perhaps"})


def test_options_belong_to_the_class_that_takes_them():
    custom = Config().replace({"engine.name": "a:B", "engine.options": {"k": {"n": 1}}, "engine.options.m": 2})
    assert custom.engine == CustomEngine(name="a:B", options={"k": {"n": 1}, "m": 2})
    with pytest.raises(ConfigError, match=r"unknown setting 'engine\.options\.k\.m'"):
        custom.replace({"engine.options.k.m": 2})
    assert custom.replace({"engine.name": "a:C"}).engine == CustomEngine(name="a:C")
    assert custom.replace({"engine.name": "auto"}).engine == VLLMEngine()
    for wrong in ("a..b:C", ".:C", "a:b:c"):
        with pytest.raises(ConfigError, match=rf"engine\.name must .*, got {wrong!r}"):
            Config().replace({"engine.name": wrong})


def test_the_last_of_two_names_counts():
    changes = {"objective.name": "grpo", "objective": {"name": "ppo"}}
    assert Config().replace(changes).objective == OBJECTIVES["ppo"]()


def test_a_later_version_may_have_made_a_section_of_a_number():
    with pytest.raises(ConfigError, match=r"training\.steps must be .*, got {'a': 1}"):
        parse_known({"training": {"steps": {"a": 1}}})


@pytest.mark.parametrize("section", ["objective", "engine"])
def test_a_section_that_is_none_is_refused(section: str):
    with pytest.raises(ConfigError, match=f"{section} must be a section of settings, got 3"):
        parse({section: 3})
