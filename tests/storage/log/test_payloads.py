from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.harness.fetched import fetched_of
from storage import layout
from storage.log import shard_reader
from storage.log.payloads import Payloads
from storage.log.schema import COLUMNS, encode, to_table
from storage.log.shard_reader import ShardReader
from storage.log.sync_records import Shard
from storage.log.trajectories import Trajectories
from storage.objects.store import Store
from storage.runs.run import Run
from tba.errors import Damaged, Missing
from tba.types import Trajectory
from tests.support.builders import make_shard, make_trajectory, rows_in, rows_of
from tests.support.storage.stored_objects import overwrite
from tests.support.stores import only_s3

on_disk = pytest.mark.parametrize("root", ["local"], indirect=True)


class Counting:
    """A store that records the requests to it."""

    def __init__(self, store: Store):
        self.store = store
        self.read_bytes: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def read(self, key: str) -> bytes:
        return self._counted(self.store.read(key))

    def read_range(self, key: str, start: int, length: int) -> bytes:
        return self._counted(self.store.read_range(key, start, length))

    def _counted(self, data: bytes) -> bytes:
        self.read_bytes.append(len(data))
        return data


def counted(run: Run) -> tuple[Run, Counting]:
    store = Counting(run.store)
    return replace(run, store=cast(Store, store)), store


@pytest.fixture(autouse=True)
def _own_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("root")  # with a cache that all tests share
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "cache"))


def round_of(seq: int, *, rows: int = 600, tokens: int = 20) -> list[Trajectory]:
    """Make a round with several row groups, in which all rows differ."""
    rng = np.random.default_rng(seq)
    return [
        make_trajectory(
            f"p{slot // 20:03d}",
            round=seq,
            slot=slot,
            tokens=rng.integers(0, 32_000, tokens).tolist(),
            response=f"{slot}",
            ref_logps=tuple((-rng.integers(0, 1000, tokens) / 64).tolist()),
            reward=slot / 7,
            finished=slot % 3 > 0,
            loss_mask=tuple(n % 7 != slot % 11 for n in range(tokens)) if slot % 4 == 1 else None,
        )
        for slot in range(rows)
    ]


def admit(run: Run, rounds: Sequence[Sequence[Trajectory]]) -> list[Shard]:
    """Append rounds, and return their shards as a record names them."""
    keys = [Trajectories(run).append(0, trajectories[0].round, trajectories) for trajectories in rounds]
    return [as_found(run, key, len(trajectories)) for key, trajectories in zip(keys, rounds, strict=True)]


def as_found(run: Run, key: str, rows: int) -> Shard:
    data, (searcher, seq) = run.store.read(key), layout.parse_shard(key) or (0, 0)
    return Shard(key=key, searcher=searcher, seq=seq, rows=rows, bytes=len(data), sha256=sha256(data).hexdigest())


def make_payloads(run: Run, *, memory_bytes: int = 1 << 30, disk_bytes: int = 1 << 30) -> Payloads:
    return Payloads(run, memory_bytes=memory_bytes, disk_bytes=disk_bytes)


# --- what is fetched is what was stored -------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [shard_reader.WHOLE, 0])
def test_rows_come_back_in_the_order_asked_for_however_they_are_read(
    run: Run, whole: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shard_reader, "WHOLE", whole)
    rounds = [round_of(0), round_of(1, rows=3), make_shard({"a": [0.5]}, round=2)]
    shards = admit(run, rounds)
    fetched = make_payloads(run)
    for places in ([(0, 599), (1, 2), (0, 0), (2, 0), (0, 300), (0, 599)], [(0, 1), (1, 0), (0, 599), (0, 320)], []):
        expected = [replace(rounds[n][row], trajectory_id=f"0/{n}/{row}") for n, row in places]
        found = fetched.fetch([(shards[n], row) for n, row in places])
        assert rows_of(found) == rows_of(fetched_of(expected))


@on_disk
def test_a_row_that_a_shard_does_not_have_is_missing(run: Run):
    [shard] = admit(run, [round_of(0, rows=3)])
    with pytest.raises(Missing, match="has 3 rows, none at 3"):
        make_payloads(run).fetch([(shard, 3)])


@pytest.mark.parametrize("whole", [shard_reader.WHOLE, 0])
def test_light_columns_are_those_of_the_shards_in_their_order(run: Run, whole: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shard_reader, "WHOLE", whole)
    rounds = [round_of(0), round_of(1, rows=3)]
    shards = admit(run, rounds)
    found = list(ShardReader(run, disk_bytes=0).light(reversed(shards), COLUMNS))
    assert [shard for shard, _ in found] == shards[::-1]
    for shard, table in found:
        expected = to_table(rounds[shard.seq], run=run.name, searcher=0, seq=shard.seq).select(COLUMNS)
        assert table.equals(expected)


@on_disk
def test_a_mask_is_handed_over_only_where_a_row_has_one(run: Run):
    [shard] = admit(run, [round_of(0, rows=6)])
    fetched = make_payloads(run)
    assert fetched.fetch([(shard, 0), (shard, 2)]).loss_mask is None
    mask = fetched.fetch([(shard, 0), (shard, 1)]).loss_mask
    assert mask is not None and mask.lengths_B.tolist() == [20, 20]
    assert mask.elements_N.tolist() == [True] * 20 + [n % 7 != 1 for n in range(20)]


@on_disk
def test_logps_of_the_reference_are_handed_over_only_where_all_rows_have_them(run: Run):
    stored, unknown = admit(run, [[make_trajectory()], [make_trajectory(round=1, ref_logps=None)]])
    assert rows_in(make_payloads(run).fetch([(stored, 0)]).ref_logps) == [(-0.25, -0.25, -0.25)]
    for places in ([(unknown, 0)], [(stored, 0), (unknown, 0)]):
        fetched = make_payloads(run).fetch(places)
        assert fetched.ref_logps is None and len(fetched) == len(places)


@on_disk
def test_values_of_steps_are_handed_over_where_they_are_asked_for_and_none_where_none_are_stored(run: Run):
    divided = make_trajectory(slot=1, tokens=(5, 6, 7), step_ends=(1, 3), step_values=(0.25, -0.5))
    [shard] = admit(run, [[make_trajectory(slot=0), divided]])
    plain = make_payloads(run).fetch([(shard, 0), (shard, 1)])
    assert plain.step_ends is None and plain.step_values is None
    found = Payloads(run, memory_bytes=1 << 30, disk_bytes=0, values=True).fetch([(shard, 1), (shard, 0), (shard, 1)])
    assert rows_in(found.step_ends) == [(1, 3), (), (1, 3)]
    assert rows_in(found.step_values) == [(0.25, -0.5), (), (0.25, -0.5)]


# --- budgets ----------------------------------------------------------------------------------------------------------


@on_disk
def test_memory_holds_what_was_used_last_within_the_budget(run: Run):
    shards = admit(run, [round_of(seq, rows=250, tokens=300) for seq in range(6)])
    size = payload_bytes(run, shards[0])
    counting, store = counted(run)
    kept, before = make_payloads(counting, memory_bytes=3 * size + size // 2), pa.total_allocated_bytes()
    for n in (0, 1, 2, 0, 3):  # 3 displaces 1
        kept.fetch([(shards[n], 7)])
    assert pa.total_allocated_bytes() - before <= kept.limit
    assert len(store.read_bytes) == 4
    kept.fetch([(shards[n], n) for n in (0, 2, 3)])
    assert len(store.read_bytes) == 4
    kept.fetch([(shards[1], 0)])
    assert len(store.read_bytes) == 5


@on_disk
def test_what_is_said_to_be_in_memory_is_there(run: Run):
    shards = admit(run, [round_of(seq, rows=250, tokens=300) for seq in range(4)])
    kept, before = make_payloads(run), pa.total_allocated_bytes()
    kept.fetch([(shard, row) for shard in shards for row in (0, 249)])
    assert kept.nbytes == pytest.approx(pa.total_allocated_bytes() - before, rel=0.02)


@on_disk
def test_of_a_shard_only_row_groups_that_were_asked_for_are_kept(run: Run):
    [shard] = admit(run, [round_of(0, rows=1000, tokens=100)])
    kept = make_payloads(run)
    kept.fetch([(shard, 0), (shard, 255)])
    one = kept.nbytes
    kept.fetch([(shard, 999)])
    assert one < kept.nbytes < 2.5 * one
    kept.fetch([(shard, row) for row in range(1000)])
    assert kept.nbytes > 3.5 * one


def payload_bytes(run: Run, shard: Shard) -> int:
    kept = make_payloads(run)
    kept.fetch([(shard, 0)])
    return kept.nbytes


@only_s3
def test_a_remote_shard_is_asked_for_once_on_this_machine(run: Run):
    rounds = [round_of(seq) for seq in range(3)]
    shards = admit(run, rounds)
    counting, store = counted(run)
    for _ in range(2):  # like two processes, both without memory
        fetched = make_payloads(counting, memory_bytes=0)
        for row in (0, 300):
            expected = [replace(rounds[n][row], trajectory_id=f"0/{n}/{row}") for n in range(3)]
            found = fetched.fetch([(shard, row) for shard in shards])
            assert rows_of(found) == rows_of(fetched_of(expected))
    list(ShardReader(counting, disk_bytes=1 << 30).light(shards, COLUMNS))
    assert sorted(store.read_bytes) == sorted(shard.bytes for shard in shards)


@only_s3
def test_without_a_budget_on_disk_a_remote_shard_is_asked_for_again(run: Run):
    [shard] = admit(run, [round_of(0)])
    counting, store = counted(run)
    fetched = make_payloads(counting, memory_bytes=0, disk_bytes=0)
    assert rows_of(fetched.fetch([(shard, 0)])) == rows_of(fetched.fetch([(shard, 0)]))
    assert store.read_bytes == [shard.bytes] * 2


@only_s3
def test_of_a_large_remote_shard_only_parts_are_asked_for(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shard_reader, "WHOLE", 1 << 20)
    [shard] = admit(run, [round_of(0, rows=2000, tokens=200)])
    assert shard.bytes > shard_reader.WHOLE
    counting, store = counted(run)
    list(ShardReader(counting, disk_bytes=1 << 30).light([shard], COLUMNS))
    assert sum(store.read_bytes) < shard.bytes / 4
    store.read_bytes.clear()
    make_payloads(counting).fetch([(shard, 1000)])
    assert sum(store.read_bytes) < shard.bytes / 4
    assert len(store.read_bytes) <= 4


# --- damage -----------------------------------------------------------------------------------------------------------


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def other_round(data: bytes) -> bytes:
    return encode(to_table(round_of(1), run="first", searcher=0, seq=1))


def anothers(data: bytes) -> bytes:
    return data.replace(b"first", b"fir5t")  # of the same length, with all pages unchanged


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "torn in the middle": lambda data: data[: len(data) // 2] + bytes(60) + data[len(data) // 2 + 60 :],
    "a bit of its end": lambda data: flipped(data, len(data) - 1),
    "truncated": lambda data: data[:-100],
    "empty": lambda data: b"",
    "another shard": other_round,
    "of another run": anothers,
}


@pytest.mark.parametrize("whole", [shard_reader.WHOLE, 0])
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("root", ["local", "moto"], indirect=True)
def test_a_shard_that_is_not_what_was_admitted_is_named_not_used(
    run: Run, damage: str, whole: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shard_reader, "WHOLE", whole)
    [shard] = admit(run, [round_of(0)])
    overwrite(run, shard.key, DAMAGE[damage](run.store.read(shard.key)))
    with pytest.raises(Damaged, match=r"searcher=000/seq=00000000\.parquet"):
        make_payloads(run).fetch([(shard, row) for row in range(shard.rows)])


@on_disk
def test_content_that_is_forged_to_the_measures_of_the_record_is_found_where_it_is_read_whole(run: Run):
    [shard] = admit(run, [make_shard({"a": [0.25]})])
    forged = encode(to_table(make_shard({"a": [0.75]}), run=run.name, searcher=0, seq=0))
    assert len(forged) == shard.bytes
    overwrite(run, shard.key, forged)
    assert len(list(ShardReader(run, disk_bytes=0).light([shard], COLUMNS))) == 1
    with pytest.raises(Damaged, match="its sha256 differs"):
        make_payloads(run).fetch([(shard, 0)])


@on_disk
def test_a_flipped_bit_anywhere_leaves_rows_as_they_were_or_is_damage(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shard_reader, "WHOLE", 0)
    [shard] = admit(run, [round_of(0, rows=100)])

    def read() -> tuple[pa.Table, list[tuple]]:
        [(_, table)] = ShardReader(run, disk_bytes=0).light([shard], COLUMNS)
        return table, rows_of(make_payloads(run).fetch([(shard, row) for row in range(100)]))

    expected, data, path, refused = read(), run.store.read(shard.key), Path(run.url) / shard.key, 0
    for place in np.random.default_rng(0).integers(0, len(data), 200).tolist():
        path.write_bytes(flipped(data, place))
        try:
            assert read() == expected
        except Damaged as error:
            assert shard.key in str(error)
            refused += 1
    assert refused > 100


@pytest.mark.parametrize("whole", [shard_reader.WHOLE, 0])
@pytest.mark.parametrize("root", ["local", "moto"], indirect=True)
def test_a_shard_that_is_gone_is_missing(run: Run, whole: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shard_reader, "WHOLE", whole)
    [shard] = admit(run, [round_of(0)])
    run = replace(run, config={"limits": {"store_deadline": 0.3}})
    run.store.delete(shard.key)
    with pytest.raises(Missing, match=r"searcher=000/seq=00000000\.parquet"):
        make_payloads(run).fetch([(shard, 0)])
    with pytest.raises(Missing, match=r"searcher=000/seq=00000000\.parquet"):
        list(ShardReader(run, disk_bytes=0).light([shard], COLUMNS))
