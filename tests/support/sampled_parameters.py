"""Chooses the parameters of a test that `make test` runs; `make test-long` runs the others."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def sampled(values: Iterable[Any], *, kept: Collection[Any]) -> list[Any]:
    """Return the values as parameters of a test. All but those in `kept` are marked as long. If a test has several
    parameters, each value is a tuple of theirs."""
    values = list(values)
    assert all(it in values for it in kept), kept
    return [
        pytest.param(*(it if isinstance(it, tuple) else (it,)), marks=() if it in kept else pytest.mark.long)
        for it in values
    ]
