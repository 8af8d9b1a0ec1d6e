"""Fixtures for all tests: stores of each kind, and their servers, which start when the first test needs them."""

from __future__ import annotations

import os

# Tiny models are fastest on one thread, and threads that spin for work slow down everything else on a small machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import random
import secrets
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from benchmarks.harness import servers
from benchmarks.harness.servers import Server
from storage.objects.open_store import open_store
from storage.objects.store import Store
from storage.queries import mirror
from storage.runs.run import Run
from tests.support import browser as browsers
from tests.support import laptop, worker_groups
from tests.support.stores import STORES

if TYPE_CHECKING:
    from playwright.sync_api import Browser

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a background shell; some tests send SIGINT
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure() -> None:
    worker_groups.chosen_part()  # a wrong one is an error before any worker starts


@pytest.hookimpl(trylast=True)  # after `-m`, so that the parts of the tests that it leaves take equally long
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    worker_groups.leave_out_long_tests(config, items)
    worker_groups.leave_out_other_parts(config, items)
    laptop.skip_lacking(items)
    if hasattr(config, "workerinput"):
        worker_groups.begin_with_slow_tests(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return worker_groups.make_scheduler(config, log) if config.getvalue("dist") == "loadscope" else None


def pytest_collectstart() -> None:
    seed_all()  # modules make models as they are imported


def pytest_runtest_setup() -> None:
    seed_all()


def seed_all() -> None:
    """Seed the generators of whole processes, so that no test depends on chance or on the tests before it."""
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@contextmanager
def skipping_unless(needed: str) -> Iterator[None]:
    """Skip a test whose server is not installed. If the environment has the variable `needed`, fail it instead."""
    try:
        yield
    except servers.NotInstalled as error:
        (pytest.fail if os.environ.get(needed) else pytest.skip)(str(error))


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with servers.moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="session")
def ceph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with skipping_unless("TBA_TESTS_NEED_CEPH"), servers.ceph(tmp_path_factory.mktemp("ceph")) as server:
        yield server


@pytest.fixture(scope="session")
def s3(request: pytest.FixtureRequest) -> Server:
    """Return the real S3 server if it is installed, else the simulation."""
    return request.getfixturevalue("moto" if servers.lacking_for_ceph() else "ceph")


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with servers.rclone(tmp_path_factory.mktemp("rclone")) as server:
        yield server


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    with skipping_unless("TBA_TESTS_NEED_POSTGRES"), servers.postgres() as url:
        yield url


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with browsers.launch() as browser:
        yield browser


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def own_cache(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty cache. The shared cache may have the same content under the same name, from other tests."""
    if "root" in request.fixturenames:
        request.getfixturevalue("root")  # which chooses the shared cache
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def short_pauses(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the shared cache, and hardly wait before a new attempt at a snapshot of a run."""
    monkeypatch.setenv("TBA_CACHE", str(cache))
    monkeypatch.setattr(mirror, "PAUSES", (0.0, 0.01))


@pytest.fixture(params=STORES)
def root(request: pytest.FixtureRequest, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return an empty root, once for each kind of store. Environment variables give the address and the keys of the
    store, also to processes that a test starts. A test that needs only one kind is marked with
    `@pytest.mark.parametrize("root", ["local"], indirect=True)`."""
    monkeypatch.setenv("TBA_CACHE", str(cache))
    if request.param == "local":
        return str(tmp_path / "root")
    return s3_root(request.getfixturevalue(request.param), monkeypatch)


def s3_root(server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return an empty root on a server, and set the environment variables with its address and keys."""
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    return f"s3://{servers.BUCKET}/{secrets.token_hex(8)}"


@pytest.fixture
def store(root: str) -> Store:
    return open_store(root, deadline=20.0)


@pytest.fixture
def run(root: str) -> Run:
    config = {"seed": 0, "limits": {"store_deadline": 20.0}}
    return Run.create(root, "first", config=config, sampler_sql="select 1", code_version="test")
