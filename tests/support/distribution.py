"""Which tests are run, and which worker of `pytest -n` runs them."""

from collections.abc import Hashable, Sequence

import pytest

SECONDS = {True: 10.0, False: 0.5}
"""What a test is taken to need, by whether it is marked as slow."""
SHARED_BY_MANY_TESTS = ("module", "class", "package")
SLOW_TO_START = ("stack",)
"""Fixtures of the session of which one worker has enough: a Prefect server needs seconds and hundreds of megabytes."""


def leave_out_long_tests(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests marked as long, unless `-m` names that marker."""
    if "long" in config.option.markexpr:
        return
    long = [item for item in items if item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if not item.get_closest_marker("long")]


def keep_together(item: pytest.Item) -> None:
    """Give a test the group of those that share a fixture with it, for `--dist loadgroup`."""
    shared = _shared_by(item)
    if shared:
        item.add_marker(pytest.mark.xdist_group(shared))


def begin_with_slow_tests(items: list[pytest.Item]) -> None:
    """Sort the groups by the time that they need, so that no worker begins a long one at the end."""
    groups: dict[Hashable, list[pytest.Item]] = {}
    for item in items:
        marker = item.get_closest_marker("xdist_group")
        groups.setdefault(marker.args[0] if marker else item, []).append(item)
    items[:] = [item for of in sorted(groups.values(), key=_seconds, reverse=True) for item in of]


def _shared_by(item: pytest.Item) -> str:
    """Name what a test shares with others, empty if nothing is worth keeping them together."""
    if not isinstance(item, pytest.Function):
        return ""
    fixtures = item._fixtureinfo.name2fixturedefs
    for name in SLOW_TO_START:
        if name in fixtures:
            return name
    of_the_file = any(it.scope in SHARED_BY_MANY_TESTS for found in fixtures.values() for it in found)
    return item.nodeid.partition("::")[0].replace("/", ".") if of_the_file else ""


def _seconds(items: Sequence[pytest.Item]) -> float:
    return sum(SECONDS[item.get_closest_marker("slow") is not None] for item in items)
