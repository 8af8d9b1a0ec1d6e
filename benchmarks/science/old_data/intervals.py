"""Confidence intervals of a mean by Student's t distribution."""

import math
from collections.abc import Sequence
from statistics import mean
from typing import NamedTuple

from benchmarks.harness.rows import standard_error


class Interval(NamedTuple):
    """A mean, and the distance from it to both ends of its interval."""

    mean: float
    half: float

    @property
    def excludes_zero(self) -> bool:
        return abs(self.mean) > self.half


def interval(values: Sequence[float], *, level: float, comparisons: int = 1) -> Interval:
    """Return the interval of the mean of several values. All of so many intervals together hold with the probability
    `level` (Bonferroni)."""
    if len(values) < 2:
        raise ValueError(f"an interval needs at least 2 values, got {len(values)}")
    quantile = t_quantile(1 - (1 - level) / (2 * comparisons), len(values) - 1)
    return Interval(mean(values), quantile * standard_error(values))


def t_quantile(probability: float, degrees: int) -> float:
    """Return the value that is exceeded with 1 - `probability`, for a probability of at least one half."""
    inside = 2 * probability - 1  # between minus and plus the value
    if not 0 <= inside < 1 or degrees < 1:
        raise ValueError(f"no quantile of Student's t at {probability} with {degrees} degrees of freedom")
    low, high = 0.0, math.pi / 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _share_within(middle, degrees) < inside else (low, middle)
    return math.tan(low) * math.sqrt(degrees)


def _share_within(angle: float, degrees: int) -> float:
    """Return the probability of values up to tan(angle) √degrees in size, by its finite series (Abramowitz and Stegun,
    26.7.3 and 26.7.4)."""
    cosine, is_odd = math.cos(angle), degrees % 2 == 1
    term, total = (cosine if is_odd else 1.0), 0.0
    for n in range(2 if is_odd else 1, degrees, 2):
        total += term
        term *= cosine**2 * n / (n + 1)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if is_odd else total
