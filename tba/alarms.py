"""Alarms: what goes wrong quietly. Each is told once when it begins, and once when it is over."""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from tba.config import AlarmsConfig
from tba.types import Metrics, Outcome

BEGAN, OVER = "began", "over"  # what the data of an alarm's event says under `alarm`

_NOISE = 4.0  # standard deviations that a mean reward may fall by
_LEAST = 0.1  # of a mean reward that it may fall by in any case


class Alarm(NamedTuple):
    kind: str
    message: str
    of: str = ""  # whose, or where, if there can be several of a kind
    severity: str = "warning"


class Alarms:
    """Those that one role tells, by `tell(kind, message, severity, **data)`. One is over once so many looks in a row
    have not found it."""

    def __init__(self, tell: Callable[..., None], *, patience: int = 1):
        self.tell, self.patience = tell, patience
        self.held: dict[tuple[str, str], _Held] = {}

    def look(self, found: Iterable[Alarm]) -> None:
        """With all that hold now."""
        present = {(alarm.kind, alarm.of): alarm for alarm in found}
        for key, alarm in present.items():
            if key not in self.held:
                self.held[key] = _Held(alarm.message)
                self._tell(alarm, alarm.message, alarm.severity, BEGAN)
            self.held[key].absent = 0
        for key in self.held.keys() - present.keys():
            held = self.held[key]
            held.absent += 1
            if held.absent >= self.patience:
                del self.held[key]
                message = f"over after {time.monotonic() - held.since:.0f} s: {held.message}"
                self._tell(Alarm(key[0], message, key[1]), message, "info", OVER)

    def _tell(self, alarm: Alarm, message: str, severity: str, word: str) -> None:
        data: dict[str, Any] = {"alarm": word} | ({"of": alarm.of} if alarm.of else {})
        self.tell(alarm.kind, message, severity=severity, **data)


class _Held:
    def __init__(self, message: str):
        self.message, self.since, self.absent = message, time.monotonic(), 0


class LearningAlarms:
    """What is wrong with what a trainer learns from, by the last `window` steps of its life."""

    def __init__(self, config: AlarmsConfig):
        self.config = config
        self.rewards, self.equal = deque[float](maxlen=config.window), deque[float](maxlen=config.window)
        self.first: float | None = None  # mean reward of the first window
        self.best, self.spread = 0.0, 0.0  # of the best window: its mean, and how its steps differ

    def find(self, step: int, metrics: Metrics, outcomes: Sequence[Outcome]) -> list[Alarm]:
        """After a step: all that hold."""
        found = [self._equal(metrics), self._collapsed(step, metrics), self._exploded(step, metrics, outcomes)]
        return [alarm for alarm in found if alarm]

    def _equal(self, metrics: Metrics) -> Alarm | None:
        if "equal_rewards" not in metrics:
            return None
        self.equal.append(metrics["equal_rewards"])
        share, most = statistics.fmean(self.equal), self.config.equal_rewards
        if not most or len(self.equal) < self.config.window or share < most:
            return None
        return Alarm(
            "rewards-equal",
            f"in {share:.0%} of the groups of the last {self.config.window} steps all responses had the same reward "
            "(alarms.equal_rewards): they teach nothing but the reference",
        )

    def _collapsed(self, step: int, metrics: Metrics) -> Alarm | None:
        if "reward_mean" not in metrics or not self.config.reward_lost:
            return None
        self.rewards.append(metrics["reward_mean"])
        if len(self.rewards) < self.config.window:
            return None
        mean = statistics.fmean(self.rewards)
        if self.first is None or mean > self.best:
            self.best, self.spread = mean, statistics.pstdev(self.rewards)
        self.first = mean if self.first is None else self.first
        gained = self.best - self.first
        noise = _NOISE * (self.spread or statistics.pstdev(self.rewards))  # rewards may have been the same throughout
        if self.best - mean <= max(self.config.reward_lost * gained, noise, _LEAST * abs(self.best)):
            return None
        return Alarm(
            "reward-collapsed",
            f"step {step}: the mean reward of the last {self.config.window} steps is {mean:.4g}, after {self.best:.4g} "
            f"at best and {self.first:.4g} at first (alarms.reward_lost)",
        )

    def _exploded(self, step: int, metrics: Metrics, outcomes: Sequence[Outcome]) -> Alarm | None:
        tokens, most = metrics.get("tokens", 0.0), self.config.log_ratio
        ratios = [abs(it.logp - it.ref_logp) for it in outcomes if it.logp is not None and it.ref_logp is not None]
        if not most or not tokens or sum(ratios) <= most * tokens:
            return None
        return Alarm(
            "log-ratio-large",
            f"step {step}: log π − log π_ref is {sum(ratios) / tokens:.3g} a token in the mean, more than {most:g} "
            "(alarms.log_ratio): the policy is far from the reference, or from what it is trained on",
        )
