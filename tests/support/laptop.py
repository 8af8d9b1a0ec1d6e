"""Tests that need the packages of requirements-laptop.txt: a real language model, data sets and a classifier."""

import os
from collections.abc import Iterable
from importlib.util import find_spec

import pytest


def needs(*modules: str) -> pytest.MarkDecorator:
    """Return a mark for tests that import these modules. `skip_lacking` skips them where a module is not installed."""
    return pytest.mark.laptop(*modules)


def skip_lacking(items: Iterable[pytest.Item]) -> None:
    """Skip the tests whose modules are not installed, unless TBA_TESTS_NEED_LAPTOP is set: then they fail."""
    if os.environ.get("TBA_TESTS_NEED_LAPTOP"):
        return
    for item in items:
        lacking = [name for mark in item.iter_markers("laptop") for name in mark.args if find_spec(name) is None]
        if lacking:
            reason = f"{', '.join(lacking)} not installed: `make test-laptop` installs it beside the environment"
            item.add_marker(pytest.mark.skip(reason=reason))
