"""A finished run, a connection to its views, and its pages, for the tests in this folder. No test changes them."""

from collections.abc import Iterator

import duckdb
import pytest

import storage
from storage.runs.run import Run
from tests.support.flows.site import Site, serve
from tests.support.storage.synthetic import make_run


@pytest.fixture(scope="package")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(str(tmp_path_factory.mktemp("root")))


@pytest.fixture(scope="package")
def con(finished: Run) -> duckdb.DuckDBPyConnection:
    return storage.connect(finished)


@pytest.fixture(scope="package")
def site(finished: Run) -> Iterator[Site]:
    with serve(finished) as site:
        yield site
