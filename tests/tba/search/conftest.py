import pytest

from benchmarks.harness import fakes


@pytest.fixture
def looks_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let looks end at once. Real looks are tested in tests/tba/search/test_version_watcher.py."""
    monkeypatch.setattr("tba.search.version_watcher.Background", fakes.AtOnce)
