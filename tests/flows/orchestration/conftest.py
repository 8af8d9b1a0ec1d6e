"""A Prefect server with workers and an S3 server, started once for this folder. Roles are scripts (script_role.py),
except in runs that name a policy: their roles are real."""

import sys
from collections.abc import Iterator

import pytest

from benchmarks.harness.servers import Server
from flows.orchestration.local_server import POOLS, Stack
from tests.support.flows.roles import SCRIPT_ROLE


@pytest.fixture(scope="package")  # not for the session: an idle server and its workers take a tenth of a core
def stack(tmp_path_factory: pytest.TempPathFactory, s3: Server) -> Iterator[Stack]:
    home = tmp_path_factory.mktemp("stack")
    variables = {
        "TBA_ROLE_COMMAND": f"{sys.executable} {SCRIPT_ROLE}",
        "TBA_HOME": str(home),
        "TBA_CACHE": str(home / "cache"),
        **s3.environment(),
    }
    with Stack(home, pools=POOLS, variables=variables) as stack:
        yield stack
