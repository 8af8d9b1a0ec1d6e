"""Which tests are run, and which worker of `pytest -n` runs them."""

import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

SECONDS = {True: 10.0, False: 0.5}
"""The estimated seconds of a test, by whether the test is marked as slow."""
SECONDS_TO_SHARE = 20.0
"""The estimated seconds before the first test of a group, which often makes a whole run."""
SHARED_BY_A_FILE = re.compile(r'scope="(?:module|class)"')
SHARED_BY_ALL = re.compile(r"\bstack: Stack\b")
"""A test with a Prefect server. Of such servers, which need seconds to start, one is enough."""


def leave_out_long_tests(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests marked as long, unless `-m` names that marker."""
    if "long" in config.option.markexpr:
        return
    long = [item for item in items if item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if not item.get_closest_marker("long")]


def chosen_part() -> tuple[int, int]:
    """Return the part of the tests that $TBA_TESTS_PART names: (2, 3) for `2/3`, the second of three parts. Unset or
    empty, the variable means all tests."""
    part = os.environ.get("TBA_TESTS_PART") or "1/1"
    numbers = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", part)
    if not numbers or int(numbers[1]) > int(numbers[2]):
        raise pytest.UsageError(f"TBA_TESTS_PART must be a part such as 2/3, got {part!r}")
    return int(numbers[1]), int(numbers[2])


def leave_out_other_parts(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of other parts than the chosen one. All parts take about equally long."""
    number, of = chosen_part()
    groups = _groups(items)
    left_out = [item for n, group in enumerate(groups) if n % of != number - 1 for item in group]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for group in groups[number - 1 :: of] for item in group]


def begin_with_slow_tests(items: list[pytest.Item]) -> None:
    """Sort the groups by the time that they need, so that no worker begins a long one at the end."""
    items[:] = [item for group in _groups(items) for item in group]


def make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each worker one group after the other."""
    from xdist.scheduler import LoadScopeScheduling  # not everybody who runs tests has it

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Groups(config, log)


def group_of(nodeid: str) -> str:
    """Name the group of tests that one worker runs: the tests that share a fixture which is slow to make, or a test."""
    return _group_of_file(nodeid.partition("::")[0]) or nodeid


@cache
def _group_of_file(path: str) -> str:
    text = Path(__file__).parents[2].joinpath(path).read_text()
    if SHARED_BY_ALL.search(text):
        return "stack"
    return path if SHARED_BY_A_FILE.search(text) else ""


def _groups(items: Sequence[pytest.Item]) -> list[list[pytest.Item]]:
    """Return the groups of tests, those that need most time first."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(group_of(item.nodeid), []).append(item)
    return sorted(groups.values(), key=_seconds, reverse=True)


def _seconds(items: Sequence[pytest.Item]) -> float:
    first = SECONDS_TO_SHARE if len(items) > 1 else 0.0
    return first + sum(SECONDS[item.get_closest_marker("slow") is not None] for item in items)
