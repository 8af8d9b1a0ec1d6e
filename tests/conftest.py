"""Fixtures for every test: stores of each kind, and the servers behind them, started when the first test asks."""

import os

# Tiny models are fastest on one thread, and threads that spin for work slow down everything else on a small machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from benchmarks.harness import servers
from benchmarks.harness.servers import Server
from storage.objects.open_store import open_store
from storage.objects.store import Store
from storage.runs.run import Run
from tests.support import browser as browsers

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a background shell; tests press Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

STORES = ["local", "moto", pytest.param("ceph", marks=pytest.mark.ceph)]


@contextmanager
def skipping_unless(needed: str) -> Iterator[None]:
    """Tests of a server that is not installed are skipped; if the environment has the variable `needed`, they fail."""
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
    """The real server where it is installed, else the simulation."""
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
def own_cache(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache without what other tests have fetched: what has the same content is in it by the same name."""
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(params=STORES)
def root(request: pytest.FixtureRequest, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty root of each kind; the environment leads to it, also for processes that a test starts. A test that
    needs only one kind says `@pytest.mark.parametrize("root", ["local"], indirect=True)`."""
    monkeypatch.setenv("TBA_CACHE", str(cache))
    if request.param == "local":
        return str(tmp_path / "root")
    return s3_root(request.getfixturevalue(request.param), monkeypatch)


def s3_root(server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty root on a server, and the environment that leads to it."""
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
