"""Settings that are refused: unknown names, bad values, and combinations that contradict each other."""

from typing import Any

import pytest

from tba.config import parse
from tba.errors import ConfigError
from tba.presets import preset


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
        ({"objective.name": "grop"}, "objective.name must be one of 'bapo', 'dr-grpo', 'grpo', "),
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
            {"engine.name": "transformers", "engine.profile": "fast"},
            "engine.profile does not apply to 'transformers', got 'fast'",
        ),
        ({"engine.profile": "quick"}, "engine.profile must be 'safe', 'default' or 'fast', got 'quick'"),
        ({"engine.quantization": "int8"}, "engine.quantization must be 'fp8', got 'int8'"),
        (
            {"engine.quantization": "fp8"},
            "model.publish_dtype must be 'bfloat16' where engine.quantization is 'fp8', because vLLM rounds only "
            "16-bit weights to 8 bits, got 'float32'",
        ),
        (
            {"sync.lag": 0, "search.prompts_per_round": 128, "engine.in_flight": "update"},
            "engine.in_flight must be 'finish' where sync.lag is set (0), because the lag decides which version",
        ),
        (
            {"sync.lag": 0, "sampling.recent_share": 0.75, "search.prompts_per_round": 95},
            "search.searchers x search.prompts_per_round must be >= training.prompts_per_step x sync.every x "
            "sampling.recent_share (96) where sync.lag is set, or steps would repeat the prompts of a round, got 95",
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
            {"objective.name": "grpo", "objective.standardised_by": "batch", "objective.penalty": "reward"},
            "objective.standardised_by must be 'group' where objective.penalty is 'reward', got 'batch': the penalty "
            "of a batch is not known before its step",
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


@pytest.mark.parametrize(
    ("plain", "got"), [("not json", "'not json'"), (None, "None"), ([], r"\[\]"), ("[1]", r"\[1\]")]
)
def test_what_is_no_settings_at_all_is_refused(plain: Any, got: str):
    with pytest.raises(ConfigError, match=f"^the settings.*, got {got}$"):
        parse(plain)
