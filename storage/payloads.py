"""Whole shards, tokens and all: read with their checksum, the last used ones kept in memory."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256

import pyarrow as pa

from storage.run import Run
from storage.schema import TRAJECTORY_SCHEMA, Rows, decode
from storage.syncs import Shard
from tba.errors import Damaged

SIDE_BY_SIDE = 32
"""Shards asked for at once."""


def read_admitted(
    run: Run, shards: Iterable[Shard], columns: Sequence[str] = tuple(TRAJECTORY_SCHEMA.names)
) -> Iterator[tuple[Shard, pa.Table]]:
    """Some columns of shards that a record admits, as it found them. Missing or Damaged names one that is not so."""
    wanted = list(shards)
    for start in range(0, len(wanted), SIDE_BY_SIDE):
        batch = wanted[start : start + SIDE_BY_SIDE]
        for shard, data in zip(batch, run.store.read_many([shard.key for shard in batch]), strict=True):
            if sha256(data).hexdigest() != shard.sha256:
                raise Damaged(f"{run.url}/{shard.key} is not what the record that admits it found: its sha256 differs")
            yield shard, decode(data, columns)


class Payloads:
    """Rows of shards by key, up to `limit` bytes of them and at least those of the shard used last."""

    def __init__(self, run: Run, limit: int):
        self.run, self.limit = run, limit
        self.nbytes = 0
        self._kept: OrderedDict[str, Rows] = OrderedDict()

    def keep(self, key: str, table: pa.Table) -> Rows:
        rows = Rows(table)
        self._drop(key)
        self._kept[key] = rows
        self.nbytes += rows.nbytes
        while self.nbytes > self.limit and len(self._kept) > 1:
            self._drop(next(iter(self._kept)))
        return rows

    def rows(self, shards: Iterable[Shard]) -> dict[str, Rows]:
        """The rows of these shards, by key; what is not in memory is read."""
        wanted = {shard.key: shard for shard in shards}
        found = {key: self._kept[key] for key in wanted if key in self._kept}
        for key in found:
            self._kept.move_to_end(key)
        for shard, table in read_admitted(self.run, [wanted[key] for key in wanted if key not in found]):
            found[shard.key] = self.keep(shard.key, table)
        return found

    def _drop(self, key: str) -> None:
        if key in self._kept:
            self.nbytes -= self._kept.pop(key).nbytes
