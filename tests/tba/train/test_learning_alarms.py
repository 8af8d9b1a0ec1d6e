"""Alarms: when they begin and when they end."""

from typing import Any

import pytest

from benchmarks.harness import fakes
from tba.alarms import Alarm, Alarms
from tba.config import AlarmsConfig
from tba.train.learning_alarms import LearningAlarms
from tba.types import Outcome
from tests.support.tba.trainers import make, settings

WINDOW = 4


def told() -> tuple[list[tuple[str, str, str, str]], Any]:
    found: list[tuple[str, str, str, str]] = []

    def tell(kind: str, message: str, *, severity: str, **data: Any) -> None:
        found.append((kind, severity, data["alarm"], data.get("of", "")))

    return found, tell


def test_an_alarm_is_told_when_it_begins_and_when_it_is_over_and_not_between():
    found, tell = told()
    alarms = Alarms(tell, patience=2)
    late, other = Alarm("role-late", "late", "a"), Alarm("role-late", "late", "b", "error")
    for present in ([], [late], [late], [late, other], [other], [late, other], [], [other], [], [], []):
        alarms.update(present)
    assert found == [
        ("role-late", "warning", "began", "a"),
        ("role-late", "error", "began", "b"),
        ("role-late", "info", "over", "a"),
        ("role-late", "info", "over", "b"),
    ]


def test_what_a_look_finds_again_within_patience_has_not_been_over():
    found, tell = told()
    alarms = Alarms(tell, patience=2)
    for n in range(7):
        alarms.update([Alarm("x", "…")] if n % 2 == 0 else [])
    assert [word for _, _, word, _ in found] == ["began"]


def kinds(found: list[Alarm]) -> list[str]:
    return [alarm.kind for alarm in found]


def after(rewards: list[float], **changes: Any) -> list[str]:
    """Return the alarms after the last of these steps."""
    learning = LearningAlarms(AlarmsConfig(window=WINDOW, **changes))
    found: list[Alarm] = []
    for step, reward in enumerate(rewards, 1):
        found = learning.find(step, {"reward_mean": reward}, [])
    return kinds(found)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.0] * 4 + [0.8] * 4 + [0.35] * 4, True),  # loses 0.45 of a gain of 0.8
        ([0.0] * 4 + [0.8] * 4 + [0.45] * 4, False),
        ([0.0] * 4 + [0.8] * 4 + [0.0], False),  # one step is no window: the mean is 0.6
        ([0.6] * 4 + [0.1] * 4, True),  # no gain, and most is lost
        ([1.0] * 8 + [0.95] * 4, False),  # loses less than a tenth
        ([0.2, 1.0] * 4 + [0.1] * 4, False),  # steps differ more from each other
        ([-1.0] * 4 + [-0.2] * 4 + [-0.9] * 4, True),
        ([0.5] * 2 + [0.0], False),  # before there is a window
        ([0.0] * 8 + [-0.001], False),  # one step, after steps without any difference
        ([0.0] * 8 + [-1.0] * 4, True),
    ],
)
def test_a_reward_has_collapsed_when_more_is_lost_than_chance_would(rewards: list[float], expected: bool):
    assert ("reward-collapsed" in after(rewards)) == expected
    assert "reward-collapsed" not in after(rewards, reward_lost=0)


def test_equal_rewards_are_told_of_once_a_whole_window_had_them():
    learning = LearningAlarms(AlarmsConfig(window=WINDOW, equal_rewards=0.75))
    said = [kinds(learning.find(n, {"equal_rewards": it}, [])) for n, it in enumerate([1, 1, 1, 0, 0.5, 1, 1, 1])]
    assert said == [[], [], [], ["rewards-equal"], [], [], [], ["rewards-equal"]]
    assert not LearningAlarms(AlarmsConfig(window=1, equal_rewards=0)).find(1, {"equal_rewards": 1.0}, [])


def outcome(logp: float | None, ref_logp: float) -> Outcome:
    return Outcome(slot=0, position=0, advantage=0.0, residual=0.0, log_z=0.0, logp=logp, ref_logp=ref_logp)


def test_log_ratios_are_large_by_the_token_and_whatever_their_sign():
    learning = LearningAlarms(AlarmsConfig(log_ratio=2.0))
    rows = [outcome(-30.0, -10.0), outcome(-10.0, -31.0), outcome(None, -1000.0)]
    assert kinds(learning.find(1, {"tokens": 20.0}, rows)) == ["log-ratio-large"]
    assert not learning.find(1, {"tokens": 21.0}, rows)
    computed = {"tokens": 200.0, "computed_tokens": 20.0}  # rows that were not computed have no log-ratio
    assert kinds(learning.find(1, computed, rows)) == ["log-ratio-large"]
    assert not LearningAlarms(AlarmsConfig(log_ratio=0)).find(1, {"tokens": 1.0}, rows)


def test_a_trainer_tells_once_that_rewards_have_collapsed_and_once_that_they_came_back(tmp_path):
    config = settings(alarms__window=2, alarms__equal_rewards=0.0)
    trainer, _ = make(tmp_path, config, rewards=dict.fromkeys(range(4, 7), -8.0))
    trainer.run()
    assert isinstance(trainer.events, fakes.Events)
    assert trainer.events.written == [("reward-collapsed", "warning"), ("reward-collapsed", "info")]
