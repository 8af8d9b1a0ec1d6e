"""Reads the rows that go into a compaction, from shards that are objects of their own and from earlier compactions."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from storage.log.compactions import FACTS, Compaction, Compactions, Part, Place
from storage.log.schema import UNREADABLE, with_later
from storage.log.schema import decode as decode_shard
from storage.log.shard_reader import SIDE_BY_SIDE
from storage.log.sync_records import Shard
from storage.maintenance.compaction_format import Admitted
from storage.runs.run import Run
from tba.errors import Damaged, Missing


class Source(NamedTuple):
    """The rows of a shard that was read."""

    admitted: Admitted
    compaction: Compaction | None  # the compaction that it was read from; None if it was an object of its own
    table: pa.Table


class CompactionReader:
    def __init__(self, run: Run, compactions: Compactions):
        self.left: dict[str, str] = {}  # by key of a shard that stays as it is: the reason
        self._run, self._compactions = run, compactions
        self._whole: set[str] = set()  # objects that have been read and match their record
        self._last_read: tuple[Compaction, pq.ParquetFile] | None = None

    def read(self, group: Sequence[Admitted]) -> Iterator[Source]:
        """Yield the shards of a group that can be read. `left` says why the others cannot."""
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            loose = dict(zip(group, pool.map(self._read_loose, group), strict=True))
        for admitted in group:
            place = self._compactions.place(admitted.shard)
            table = self._read_compacted(admitted.shard, place) if place else loose[admitted]
            if table is not None:
                yield Source(admitted, place.compaction if place else None, table)

    def check_whole(self, compaction: Compaction) -> None:
        """Read the object of a compaction whole, unless this object has done so before. Raise Missing or Damaged if it
        does not match its record."""
        if compaction.object not in self._whole:
            self._read_whole(compaction)

    def _read_loose(self, admitted: Admitted) -> pa.Table | None:
        """Return the rows of a shard that is an object of its own. Return None if the shard lies in a compaction. Also
        return None if it is missing or damaged; `left` then says why."""
        shard = admitted.shard
        if self._compactions.place(shard):
            return None
        try:
            data = self._run.store.read(shard.key)
            if sha256(data).hexdigest() != shard.sha256:
                raise Damaged("it is not the shard that was admitted: its sha256 differs")
            return decode_shard(data)
        except Missing:
            if self._compactions.place_now(shard, None) is None:
                self.left[shard.key] = "it is missing"
        except (Damaged, *UNREADABLE) as error:
            self.left[shard.key] = str(error).splitlines()[0]
        return None

    def _read_compacted(self, shard: Shard, place: Place) -> pa.Table | None:
        """Return the rows of a shard that lies in a compaction. Return None if the compaction is damaged, or was just
        removed by another process that compacts; `left` then says why."""
        try:
            return self._read_part(place.compaction, place.part)
        except (Missing, Damaged, *UNREADABLE) as error:
            self.left[shard.key] = str(error).splitlines()[0]
            return None

    def _read_part(self, compaction: Compaction, part: Part) -> pa.Table:
        if self._last_read is None or self._last_read[0] != compaction:
            self._last_read = compaction, pq.ParquetFile(pa.BufferReader(self._read_whole(compaction)))
        table = self._last_read[1].read_row_groups(list(part.groups), use_threads=False)
        return with_later(table.drop_columns(list(FACTS)))

    def _read_whole(self, compaction: Compaction) -> bytes:
        data = self._run.store.read(compaction.object)
        if sha256(data).hexdigest() != compaction.sha256:
            raise Damaged(f"{self._run.url}/{compaction.object} is not what its record says: its sha256 differs")
        self._whole.add(compaction.object)
        return data
