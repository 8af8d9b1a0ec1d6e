"""Tests whether counts agree with probabilities, by a chi-square test at p > 1e-3."""

from collections.abc import Mapping
from typing import Any

CRITICAL = {
    1: 10.828, 2: 13.816, 3: 16.266, 4: 18.467, 5: 20.515, 6: 22.458, 7: 24.322, 8: 26.124, 9: 27.877, 11: 31.264,
    19: 43.820, 23: 49.728,
}  # fmt: skip
"""By degrees of freedom, the value that chi-square exceeds with a probability of 1 in 1000."""


def agree(counts: Mapping[Any, int], probabilities: Mapping[Any, float]) -> bool:
    """Return True if the counts pass the test. Outcomes that are not in `probabilities` must not have occurred."""
    assert counts.keys() <= probabilities.keys(), counts.keys() - probabilities.keys()
    n = sum(counts.values())
    expected = {outcome: n * p for outcome, p in probabilities.items()}
    assert min(expected.values()) >= 5, "too few draws for the test to mean anything"
    chi_square = sum((counts.get(outcome, 0) - e) ** 2 / e for outcome, e in expected.items())
    return chi_square < CRITICAL[len(expected) - 1]
