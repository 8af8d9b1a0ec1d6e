from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.buffer import arrivals
from storage.buffer.arrivals import Arrivals, Seqs
from storage.log.payloads import Payloads
from storage.log.trajectories import Trajectories
from storage.objects.store import Entry, Store
from storage.runs.run import Run
from tba.errors import Damaged
from tests.support.builders import make_shard

local_or_s3 = pytest.mark.parametrize("root", ["local", "moto"], indirect=True)


class Counting:
    """A store that counts the keys that a caller asks for."""

    def __init__(self, store: Store):
        self.store, self.names = store, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def list(self, prefix: str = "", *, after: str = "") -> Sequence[Entry]:
        found = self.store.list(prefix, after=after)
        self.names += len(found)
        return found

    def exists(self, key: str) -> bool:
        self.names += 1
        return self.store.exists(key)


def make_arrivals(run: Run) -> Arrivals:
    return Arrivals(run, Payloads(run, memory_bytes=0, disk_bytes=0), lambda table: None)


def append(run: Run, seq: int, searcher: int = 0) -> str:
    return Trajectories(run).append(searcher, seq, make_shard({"a": [0.0]}, searcher=searcher, round=seq))


def settle_all(found: Arrivals) -> list[int]:
    """Settle all arrivals, as a record does, and return their seqs."""
    seqs = sorted(arrival.shard.seq for arrival in found.found.values())
    found.settle([*found.found, *found.refused])
    return seqs


@given(st.lists(st.integers(0, 12) | st.just(2**31 - 1)))
def test_seqs_are_a_set(added: list[int]):
    seqs, expected = Seqs(), set[int]()
    for seq in added:
        seqs.add(seq)
        expected.add(seq)
        assert [it in seqs for it in range(15)] == [it in expected for it in range(15)]
        assert seqs.count == len(expected)
        assert seqs.end == max(expected) + 1
        assert seqs.first_missing == next(it for it in range(15) if it not in expected)


@local_or_s3
@pytest.mark.parametrize("missing", [None, 2])
def test_a_look_costs_what_is_new_not_what_is_stored(run: Run, missing: int | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(arrivals, "SMALL", 5)
    store = Counting(run.store)
    found = make_arrivals(replace(run, store=cast(Store, store)))
    for seq in range(40):
        if seq != missing:
            append(run, seq)
    found.look()
    assert len(settle_all(found)) == 40 - (missing is not None)
    for seq in range(40, 70):  # each shard is found as soon as it is stored
        append(run, seq)
        found.look()
        assert settle_all(found) == [seq]
    assert store.names < 40 + 30 * 10


@local_or_s3
def test_many_small_folders_are_listed_in_turn(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(arrivals, "LISTED", 8)
    store = Counting(run.store)
    found = make_arrivals(replace(run, store=cast(Store, store)))
    for searcher in range(4):
        for seq in range(1, 9):  # shard 0 is missing, so a listing of the folder names all others
            append(run, seq, searcher)
    found.look()
    assert len(settle_all(found)) == 32
    found.look()  # lists every folder once more
    store.names = 0
    for number in range(8):
        seq = 9 + number // 4
        append(run, seq, searcher=number % 4)
        found.look()
        assert settle_all(found) == [seq]
    assert store.names < 8 * 4 * 8 / 2  # with all folders at every look, it would be more than 8 * 4 * 8
    append(run, 0, searcher=2)
    for _ in range(2 * 32 // 8 + 2):
        found.look()
    assert settle_all(found) == [0]


@local_or_s3
def test_what_comes_late_is_found_after_a_few_looks(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(arrivals, "SMALL", 5)
    found = make_arrivals(run)
    for seq in range(40):
        if seq != 2:
            append(run, seq)
    found.look()
    settle_all(found)
    append(run, 2)
    run.store.create("trajectories/searcher=000/seq=notes.txt", b"")
    for _ in range(40 // 5 + 1):
        found.look()
    assert [arrival.shard.seq for arrival in found.found.values()] == [2]
    assert list(found.refused) == ["trajectories/searcher=000/seq=notes.txt"]


@local_or_s3
def test_a_gap_up_to_the_largest_seq_is_no_burden(run: Run):
    found = make_arrivals(run)
    append(run, 2**31 - 1)
    for seq in range(3):
        append(run, seq)
        found.look()
        assert seq in settle_all(found)
    found.look()
    assert not found.found


@pytest.mark.parametrize("root", ["local"], indirect=True)
def test_what_was_refused_is_settled_too(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(arrivals, "SMALL", 1)
    found = make_arrivals(run)
    for seq in range(5):
        append(run, seq)

    def refuse(table: Any) -> None:
        raise Damaged("not wanted")

    found.check = refuse
    found.look()
    assert len(found.refused) == 5
    settle_all(found)
    for _ in range(10):
        found.look()
    assert not found.refused
