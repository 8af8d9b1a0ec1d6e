"""A run for the tests in this folder. Its roles end with the test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.runs.run import Run
from tests.support.flows.roles import end_roles
from tests.support.flows.supervised import make_run


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = make_run(tmp_path)
    yield run
    end_roles(run)
