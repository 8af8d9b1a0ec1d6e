"""The stored runs of the tests in this folder, in the root that $TBA_ROOT names."""

from pathlib import Path

import pytest

from storage.runs.run import Run
from tests.support.storage.synthetic import copy_run, make_live_run, make_run


@pytest.fixture(scope="package")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a root with a finished run, `first`, and a later, interrupted run, `live`. No test changes them."""
    root = str(tmp_path_factory.mktemp("root"))
    make_run(root)
    make_live_run(root)
    return root


@pytest.fixture(autouse=True)
def default_root(root: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TBA_ROOT", root)
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def first(root: str, tmp_path: Path) -> Run:
    """Return a copy of the finished run that a test may change."""
    return copy_run(Run.open(f"{root}/runs/first"), tmp_path)
