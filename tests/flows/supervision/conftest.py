"""A run for the tests in this folder, whose roles end with the test, and processes that hold devices."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.supervision.gpus import Devices
from storage.runs.run import Run
from tests.support.flows.device_holder import Hold, Holder
from tests.support.flows.roles import end_roles
from tests.support.flows.supervised import make_run


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = make_run(tmp_path)
    yield run
    end_roles(run)


@pytest.fixture
def hold() -> Iterator[Hold]:
    """Yield a function that takes devices with a process that ends with the test."""
    holders: list[Holder] = []

    def take(devices: Devices, kind: str = "searcher") -> Holder:
        holders.append(Holder(devices, kind))
        return holders[-1]

    yield take
    for holder in holders:
        holder.kill()
