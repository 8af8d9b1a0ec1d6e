"""The replay log, to which searchers append shards."""

from collections.abc import Iterable, Sequence
from hashlib import sha256
from itertools import count

import pyarrow as pa

from storage import layout
from storage.log.schema import (
    encode,
    to_table,
)
from storage.log.shard_checks import ShardFault, check_values, columns_of, parse_name, read_shard
from storage.log.shard_reader import ShardReader
from storage.log.sync_records import named_shards
from storage.runs.run import Run
from tba.errors import AlreadyExists, Damaged, DataError, Missing, Superseded
from tba.types import Asked, Trajectory


class Trajectories:
    """Stores and finds the shards of searchers; see `TrajectoryLog` in tba/interfaces.py."""

    def __init__(self, run: Run):
        self.run = run
        self.reader = ShardReader(run, disk_bytes=0)
        self.compactions = self.reader.compactions
        self._taken: dict[int, int] = {}  # by searcher, once it has called next_seq: the highest seq that may be in use

    def next_seq(self, searcher: int) -> int:
        """Return the first free seq that is higher than all seqs of this searcher which sync records name."""
        entries = self.run.store.list(layout.searcher_folder(searcher))
        self.compactions.look()  # after the listing, so a shard that is being compacted is in one of the two
        stored = _seqs_of(searcher, {*(entry.key for entry in entries), *self.compactions.shards()})
        named = _seqs_of(searcher, named_shards(self.run))
        free = (seq for seq in count(1 + max(named, default=-1)) if seq not in stored)
        first = next(seq for seq in free if not self.run.store.exists(layout.shard(searcher, seq)))
        self._taken[searcher] = max([first, *stored])  # at least `first`, because the listing may be behind
        return first

    def asked(self, searcher: int, seqs: Iterable[int]) -> list[Asked]:
        return [asked for seq in seqs for asked in self._asked(layout.shard(searcher, seq))]

    def _asked(self, key: str) -> list[Asked]:
        try:
            table = read_shard(self.run.writer_of(key), key, self.run.store.read(key))
        except Damaged:  # no sync record will admit such a shard either
            return []
        except Missing:
            self.compactions.look()
            if (shard := self.compactions.shards().get(key)) is None:
                return []
            try:
                [(_, table)] = self.reader.light([shard], Asked._fields)
            except (Damaged, Missing):
                return []
        return [Asked(**row) for row in table.select(Asked._fields).to_pylist()]

    def append(self, searcher: int, seq: int, trajectories: Sequence[Trajectory]) -> str:
        """Store a shard and return its key; see `TrajectoryLog.append`. Raise DataError, and store nothing, if the
        replay buffer would refuse the shard."""
        if not trajectories:
            raise ValueError(f"searcher {searcher}, seq {seq}: a shard needs at least 1 trajectory, got 0")
        strangers = {t.searcher for t in trajectories} - {searcher}
        if strangers:
            raise ValueError(f"searcher {searcher} cannot append a trajectory of searcher {strangers.pop()}")
        key = layout.shard(searcher, seq)
        table, data = self._encoded(key, trajectories)
        is_new = searcher in self._taken and seq > self._taken[searcher]
        if is_new:  # false for a second try, if the answer to the first was lost
            self._taken[searcher] = seq
        try:
            self.run.store.create(key, data)
        except AlreadyExists:
            if not (self._holds(key, table, data) or self._compacted(key) == sha256(data).hexdigest()):
                raise self._another_incarnation(key) from None
        else:
            if not is_new and (digest := self._compacted(key)):  # the name was free only because of the compaction
                self.run.store.delete(key)
                if digest != sha256(data).hexdigest():
                    raise self._another_incarnation(key)
        return key

    def _encoded(self, key: str, trajectories: Sequence[Trajectory]) -> tuple[pa.Table, bytes]:
        """Return a shard's table and bytes. Raise DataError if the replay buffer would refuse the shard. The searcher
        then stops, instead of generating rounds that are all refused."""
        searcher, seq = parse_name(key)
        try:
            table = to_table(trajectories, run=self.run.name, searcher=searcher, seq=seq)
            check_values(columns_of(table))
            return table, encode(table)
        except (DataError, ShardFault) as fault:
            raise DataError(
                f"{self.run.url}/{key}: {fault}; the shard was not stored, because the replay buffer would refuse it"
            ) from None

    def _compacted(self, key: str) -> str | None:
        """Return the sha256 of the shard with this key if a compaction holds it, else None."""
        self.compactions.look()
        shard = self.compactions.shards().get(key)
        return shard.sha256 if shard else None

    def _another_incarnation(self, key: str) -> Superseded:
        searcher, _ = parse_name(key)
        return Superseded(f"{self.run.url}/{key} holds trajectories of another incarnation of searcher {searcher}")

    def _holds(self, key: str, table: pa.Table, data: bytes) -> bool:
        try:
            stored = self.run.store.read(key)
        except Missing:  # the shard has just been compacted and removed
            return False
        if stored == data:
            return True
        try:  # the bytes may differ because another version of the Parquet library wrote them
            return read_shard(self.run.name, key, stored).equals(table)
        except Damaged:
            return False


def _seqs_of(searcher: int, keys: Iterable[str]) -> set[int]:
    names = (layout.parse_shard(key) for key in keys)
    return {name[1] for name in names if name and name[0] == searcher}
