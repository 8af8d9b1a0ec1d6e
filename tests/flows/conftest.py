"""A Prefect server with workers, once for the session, whose roles are scripts (script_role.py)."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.stack import Stack


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    home = tmp_path_factory.mktemp("stack")
    variables = {
        "TBA_ROLE_COMMAND": f"{sys.executable} {Path(__file__).with_name('script_role.py')}",
        "TBA_HOME": str(home),
    }
    with Stack(home, ui=False, variables=variables) as stack:
        yield stack
