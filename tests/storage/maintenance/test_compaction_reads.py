"""Reads of compacted shards: what is requested from the store, which copies are kept, and when a shard is missing."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from storage import layout
from storage.log.compactions import Compactions
from storage.log.payloads import Payloads
from storage.log.schema import COLUMNS
from storage.log.sync_records import read_chain
from storage.objects.store import Entry, Store
from storage.runs.run import Run
from tba.errors import Missing
from tests.support.builders import rows_of
from tests.support.storage.compacted import CAPACITY, compacted
from tests.support.storage.synthetic import make_run


class Asked:
    """A store that records the requested ranges of compactions."""

    def __init__(self, store: Store):
        self.store = store
        self.ranges: list[tuple[str, int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def read_range(self, key: str, start: int, length: int) -> bytes:
        self.ranges.append((key, start, start + length))
        return self.store.read_range(key, start, length)


def asked(run: Run) -> tuple[Run, Asked]:
    store = Asked(run.store)
    return replace(run, store=cast(Store, store)), store


def every_row(run: Run, *, disk_bytes: int) -> list:
    """Read rows like a trainer that has just started: first the light columns, then two rows of each shard."""
    shards = [shard for record in read_chain(run) for shard in record.shards]
    payloads = Payloads(run, memory_bytes=0, disk_bytes=disk_bytes)
    found: list = [table for _, table in payloads.reader.light(shards, COLUMNS)]
    return found + [rows_of(payloads.fetch([(shard, row) for shard in reversed(shards)])) for row in (0, 5)]


@pytest.mark.parametrize("root", ["moto"], indirect=True)
def test_each_compaction_is_opened_once_and_a_later_life_asks_for_nothing(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("storage.maintenance.compactor.SHARDS", 5)
    run = make_run(root)
    expected = every_row(run, disk_bytes=0)
    compacted(run)
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "another machine"))
    watching, store = asked(run)
    assert every_row(watching, disk_bytes=1 << 30) == expected
    sizes = {it.object: it.bytes for it in Compactions(run).look()}
    assert len(sizes) == 3
    assert sorted(key for key, _, end in store.ranges if end == sizes[key]) == sorted(sizes)
    store.ranges.clear()
    assert every_row(watching, disk_bytes=1 << 30) == expected
    assert store.ranges == []
    for copy in (tmp_path / "another machine" / "shards").iterdir():
        copy.write_bytes(copy.read_bytes()[:-1])
    assert every_row(watching, disk_bytes=1 << 30) == expected
    assert store.ranges
    store.ranges.clear()
    assert every_row(watching, disk_bytes=0) == expected
    assert store.ranges


@pytest.mark.parametrize("root", ["moto"], indirect=True)
def test_copies_of_compacted_shards_stay_within_their_budget(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = make_run(root)
    expected = every_row(run, disk_bytes=0)
    compacted(run)
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "cache"))
    assert every_row(run, disk_bytes=10_000) == expected
    sizes = [copy.stat().st_size for copy in (tmp_path / "cache" / "shards").iterdir()]
    assert 0 < sum(sizes) <= 10_000


@pytest.mark.parametrize("root", ["moto"], indirect=True)
def test_what_has_been_given_up_is_missing_in_a_copy_too(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = make_run(root)
    compacted(run, drop_beyond=CAPACITY)
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "cache"))
    for _ in range(2):
        with pytest.raises(Missing, match=r"the tokens of row \d have been given up"):
            every_row(run, disk_bytes=1 << 30)


class Behind:
    """A store whose next `looks` listings show nothing of compactions."""

    def __init__(self, store: Store, looks: int):
        self.store, self.looks = store, looks

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def list(self, prefix: str = "", *, after: str = "") -> list[Entry]:
        if prefix != layout.COMPACTIONS or self.looks <= 0:
            return self.store.list(prefix, after=after)
        self.looks -= 1
        return []


@pytest.mark.parametrize("root", ["moto"], indirect=True)
def test_a_shard_that_is_listed_nowhere_yet_is_looked_for_until_the_deadline(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "cache"))
    run = make_run(root)
    expected = every_row(run, disk_bytes=0)
    compacted(run)
    late = replace(run, store=cast(Store, Behind(run.store, looks=50)))
    assert every_row(late, disk_bytes=0) == expected
    impatient = {"limits": {"store_deadline": 0.3}}
    with pytest.raises(Missing, match=r"seq=00000000\.parquet does not exist"):
        every_row(replace(run, store=cast(Store, Behind(run.store, looks=10**6)), config=impatient), disk_bytes=0)
