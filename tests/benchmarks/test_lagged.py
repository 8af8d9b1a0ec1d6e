"""Runs in memory: the policy of `sync.lag` syncs ago generates each batch; settings without effect are refused."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.harness.fetched import fetched_of
from benchmarks.harness.tiny_models import tiny_folder
from benchmarks.science import lagged
from benchmarks.science.lagged import HELD, Buffer, lagged_run
from tba.config import Config
from tba.errors import ConfigError
from tba.presets import preset
from tba.tasks.quickstart import Quickstart
from tba.train.learner import Learned, Learner
from tba.types import Trajectory
from tests.support.builders import make_trajectory

IN_STEP: Mapping[str, Any] = {"sync.every": 1, "sync.lag": 0}
SMALL: Mapping[str, Any] = {
    **IN_STEP,
    "task.name": "tests.benchmarks.test_lagged:Tiny",
    "training.steps": 5,
    "training.prompts_per_step": 2,
    "training.responses_per_prompt": 4,
    "training.groups_per_micro_batch": 1,
    "training.warmup_steps": 0,
    "training.learning_rate": 1e-2,
    "training.weight_decay": 0.5,  # so that versions differ, whatever the rewards are
    "search.prompts_per_round": 2,
    "search.responses_per_prompt": 4,
    "search.initial_fill": 8,
    "sampling.recent_share": 1.0,
    "sampling.copies": "all",
    "evaluation.prompts": 2,
    "evaluation.samples": 1,
}
OTHER = {
    "model.revision": "old",
    "model.trust_remote_code": True,
    "model.dtype": "bfloat16",
    "model.device": "cpu",
    "model.lora_rank": 4,
    "sampling.sql": "sampler.sql",
    "search.prompts_where": "solve_rate > 0",
    "search.searchers": 2,
}
BESIDE: Mapping[str, Mapping[str, Any]] = {"search.prompts_where": {"search.prompts_from": "first"}}
"""Other settings that a setting needs."""


class Tiny(Quickstart):
    """Quickstart with a random base policy, which needs no training before the run."""

    def recipe(self) -> str:
        return "tiny"

    def base_policy(self, folder: Path, *, seed: int, report: Callable[[str, float], None]) -> None:
        tiny_folder(folder, seed=seed)


def nothing(folder: Path) -> Mapping[str, float]:
    return {}


def small(**changes: Any) -> Config:
    return preset("quickstart").replace({**SMALL, **changes})


@pytest.mark.parametrize(
    ("lag", "every", "ages"),
    [
        (0, 1, [0, 0, 0, 0, 0]),
        (1, 1, [0, 1, 1, 1, 1]),
        (0, 2, [0, 1, 0, 1, 0]),
        pytest.param(3, 1, [0, 1, 2, 3, 3], marks=pytest.mark.long),
        (1, 2, [0, 1, 2, 3, 2]),
    ],
)
def test_a_batch_comes_from_the_policy_of_lag_syncs_ago(
    lag: int, every: int, ages: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Ages and log-probabilities agree: only at age 0 are the log-probabilities those of the policy that learns."""
    drawn: list[Sequence[Trajectory]] = []
    away: list[float] = []  # per step: largest difference between policy and sampler, in nats per response
    learn = Learner.learn

    def fetched(trajectories: Sequence[Trajectory]) -> Any:
        drawn.append(trajectories)
        return fetched_of(trajectories)

    def learned(self: Learner, step: int, batch: Any) -> Learned:
        found = learn(self, step, batch)
        pairs = zip(found.outcomes, drawn[-1], strict=True)
        away.append(max(abs(outcome.logp - sum(it.behaviour_logps)) for outcome, it in pairs))
        return found

    monkeypatch.setenv("TBA_CACHE", str(tmp_path))
    monkeypatch.setattr(lagged, "fetched_of", fetched)
    monkeypatch.setattr(Learner, "learn", learned)
    shape = {"search.prompts_per_round": 2 * every, "sync.every": every, "sync.keep_versions": lag + 2}
    config = small(**{"sync.lag": lag, **shape})
    assert [it.age for it in lagged_run(config, scored_after=range(1, 6), examine=nothing)] == ages
    assert [it < 1e-3 for it in away] == [age == 0 for age in ages]


@pytest.mark.parametrize(("copies", "drawn"), [("all", {0, 1, 2, 3}), ("newest", {2, 3})])
def test_the_settings_say_whether_copies_in_a_round_are_drawn(copies: str, drawn: set[int]):
    buffer = Buffer(small(**{"training.prompts_per_step": 1, "search.prompts_per_round": 1, "sampling.copies": copies}))
    buffer.admit(0, [make_trajectory(tokens=(7 + (slot > 2), 2), slot=slot) for slot in range(4)])
    batches = [buffer.draw(step) for step in range(1, 9)]
    assert {len(batch) for batch in batches} == {4}
    assert {it.slot for batch in batches for it in batch} == drawn


@pytest.mark.parametrize(("name", "value"), [*OTHER.items(), ("sync.lag", None)])
def test_a_setting_that_would_be_without_effect_is_refused_by_its_name(name: str, value: Any):
    config = preset("quickstart").replace({**IN_STEP, **BESIDE.get(name, {}), name: value})
    with pytest.raises(ConfigError) as refused:
        next(lagged_run(config, scored_after=[1], examine=nothing))
    assert str(refused.value).startswith(f"{name} must be ") and str(refused.value).endswith(f" got {value!r}")


def test_a_policy_is_published_in_the_number_format_of_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Rounds of the base policy are not shared between formats."""
    monkeypatch.setenv("TBA_CACHE", str(tmp_path))
    found: list[set[torch.dtype]] = []

    def formats(folder: Path) -> Mapping[str, float]:
        found.append({it.dtype for it in load_file(folder / "model.safetensors").values()})
        return {}

    generated = [
        next(lagged_run(small(**{"model.publish_dtype": name}), scored_after=[1], examine=formats)).generated
        for name in ("float32", "bfloat16")
    ]
    assert found == [{torch.float32}, {torch.bfloat16}]
    assert generated[0][0].behaviour_logps != generated[1][0].behaviour_logps


def test_a_model_that_is_no_folder_is_refused():
    with pytest.raises(ConfigError, match=r"model\.path must be a folder with model\.safetensors, got 'gpt2'"):
        next(lagged_run(small(**{"model.path": "gpt2"}), scored_after=[1], examine=nothing))


def test_every_setting_without_effect_is_tried():
    assert OTHER.keys() == HELD.keys()
