"""Alarms about learning: groups with equal rewards, a mean reward that falls, and a policy far from the reference."""

import statistics
from collections import deque
from collections.abc import Sequence

from tba.alarms import Alarm
from tba.config import AlarmsConfig
from tba.types import Metrics, Outcome

_NOISE = 4.0  # standard deviations by which a mean reward may fall without an alarm
_LEAST = 0.1  # share of the best mean reward by which it may fall without an alarm


class LearningAlarms:
    """Finds the alarms about learning that hold after a step. Two of them average over the last `window` steps, and one
    of these two compares the mean with the best since this trainer started. The third looks at the last step alone."""

    def __init__(self, config: AlarmsConfig):
        self.config = config
        self.rewards, self.equal = deque[float](maxlen=config.window), deque[float](maxlen=config.window)
        self.first: float | None = None  # mean reward of the first window
        self.best, self.spread = 0.0, 0.0  # mean reward of the best window, and standard deviation over its steps

    def find(self, step: int, metrics: Metrics, outcomes: Sequence[Outcome]) -> list[Alarm]:
        """Return all alarms that hold after a step."""
        alarms = [self._equal(metrics), self._collapsed(step, metrics), self._exploded(step, metrics, outcomes)]
        return [alarm for alarm in alarms if alarm]

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
            "(alarms.equal_rewards): such groups teach nothing but the reference",
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
            f"step {step}: the mean reward of the last {self.config.window} steps has fallen to {mean:.4g}; at best it "
            f"was {self.best:.4g}, at first {self.first:.4g} (alarms.reward_lost)",
        )

    def _exploded(self, step: int, metrics: Metrics, outcomes: Sequence[Outcome]) -> Alarm | None:
        tokens, most = metrics.get("computed_tokens", metrics.get("tokens", 0.0)), self.config.log_ratio
        ratios = [abs(it.logp - it.ref_logp) for it in outcomes if it.logp is not None and it.ref_logp is not None]
        if not most or not tokens or sum(ratios) <= most * tokens:
            return None
        return Alarm(
            "log-ratio-large",
            f"step {step}: |log π − log π_ref| is {sum(ratios) / tokens:.3g} per token on average, more than {most:g} "
            "(alarms.log_ratio): the policy is far from the reference, or from the responses it is trained on",
        )
