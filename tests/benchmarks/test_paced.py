"""The rounds of a paced task wait, its evaluations do not, and everything else is as in the task without pace."""

import time

import pytest

from benchmarks.science.paced import PacedQuickstart
from tba.config import TaskConfig
from tba.errors import ConfigError
from tba.tasks.registry import preset_of
from tests.support.tba.quickstart_examples import prompts, response

NAME = "benchmarks.science.paced:PacedQuickstart"


def test_each_round_waits_even_if_its_responses_were_rewarded_before_and_evaluations_do_not(
    monkeypatch: pytest.MonkeyPatch,
):
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    task = PacedQuickstart(TaskConfig(name=NAME, options={"latency": 0.5}))
    train, test = ([(it, response(it.answer)) for it in prompts(split)[:3]] for split in ("train", "test"))
    assert [it.value for it in task.rewards(train)] == [1.0, 1.0, 1.0]
    assert [it.value for it in task.rewards(train)] == [1.0, 1.0, 1.0]
    assert waited == [0.5, 0.5]
    assert [it.value for it in task.rewards(test)] == [1.0, 1.0, 1.0]
    assert waited == [0.5, 0.5]


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("PacedQuickstart", "quickstart"),
        ("PacedRareAnswers", "quickstart"),
        ("PacedReasoningGym", "reasoning-gym"),
        ("PacedRedTeam", "redteam"),
    ],
)
def test_the_settings_are_the_tasks_but_for_its_name(name: str, task: str):
    name = f"benchmarks.science.paced:{name}"
    assert preset_of(name) == preset_of(task).replace({"task.name": name})


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("latency", -1, r"^task\.options\.latency must .*, got -1$"),
        ("speed", 2, r"unknown setting 'task\.options\.speed'"),
    ],
)
def test_a_wrong_pace_or_an_unknown_option_is_refused(option: str, value: int, says: str):
    with pytest.raises(ConfigError, match=says):
        PacedQuickstart(TaskConfig(name=NAME, options={option: value}))
