"""Tests that need the packages of requirements-laptop.txt: a real language model, data sets and a classifier."""

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest


def needs(*modules: str) -> Callable[[Any], Any]:
    """Return a decorator for tests that import these modules. They are skipped if a module is not installed, unless
    TBA_TESTS_NEED_LAPTOP is set: then they fail."""
    lacking = [name for name in modules if find_spec(name) is None]
    skip = pytest.mark.skipif(
        bool(lacking) and not os.environ.get("TBA_TESTS_NEED_LAPTOP"),
        reason=f"{', '.join(lacking)} not installed: `make test-laptop` installs it beside the environment",
    )
    return lambda test: pytest.mark.laptop(skip(test))
