"""Experiments side by side: each runs once, a failure loses no other result, and none starts too late."""

import pytest

from benchmarks.harness.side_by_side import run_all


def square(number: int) -> int:
    if number == 3:
        raise ValueError("three")
    return number * number


def test_each_experiment_runs_once_even_if_it_is_asked_for_twice():
    found: list[int] = []
    run_all(lambda: [it for it in (1, 1, 2, 2) if it * it not in found], square, found.append, jobs=2, hours=1)
    assert sorted(found) == [1, 4]


def test_a_failure_ends_the_study_after_the_results_of_the_others():
    found: list[int] = []
    with pytest.raises(ValueError, match="three"):
        run_all(lambda: [it for it in (1, 3, 2) if it * it not in found], square, found.append, jobs=2, hours=1)
    assert 1 in found and len(found) <= 2


def test_nothing_starts_after_the_hours():
    run_all(lambda: [1], square, pytest.fail, jobs=1, hours=0)
