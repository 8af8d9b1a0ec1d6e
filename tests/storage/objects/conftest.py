"""A store that can fail, for the tests in this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.harness.faulty_proxy import faulty
from benchmarks.harness.servers import Server
from storage.objects.open_store import open_store
from tests.conftest import s3_root
from tests.support.faults.faulty_store import PART, Faulty


@pytest.fixture
def bad(moto: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Faulty]:
    """Return an empty store behind a proxy that can inject faults."""
    monkeypatch.setattr("storage.objects.s3.file_transfers.PART", PART)
    monkeypatch.setattr("storage.objects.s3.connection.SILENCE", 0.25)
    monkeypatch.setattr("storage.objects.s3.requests.FIRST_PAUSE", 0.01)
    url = s3_root(moto, monkeypatch)
    behind = open_store(url)
    with faulty(moto) as (proxy, server):
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        yield Faulty(open_store(url, deadline=20), proxy, behind, url, tmp_path)
