"""What has arrived and no record admits yet: found by listing, read once, judged."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import NamedTuple

import pyarrow as pa

from storage import layout
from storage.index import COLUMNS
from storage.payloads import Payloads, read_all
from storage.run import Run
from storage.syncs import Refusal, Shard
from storage.trajectories import read_shard
from tba.errors import Damaged


class Arrival(NamedTuple):
    shard: Shard
    light: pa.Table  # the columns of the index


class Arrivals:
    """`look` finds shards; a record that admits or refuses them settles what becomes of them, for good."""

    def __init__(self, run: Run, payloads: Payloads):
        self.run, self.payloads = run, payloads
        self.found: dict[str, Arrival] = {}
        self.refused: dict[str, Refusal] = {}
        self._settled: set[str] = set()
        self._next: defaultdict[int, int] = defaultdict(int)  # by searcher: all before this seq are settled

    def look(self) -> None:
        for key, data in read_all(self.run, [key for key in self._listed() if not self._known(key)]):
            self._judge(key, data)

    def rows(self) -> int:
        return sum(arrival.shard.rows for arrival in self.found.values())

    def take(self, shard: Shard) -> pa.Table | None:
        """The light columns of a shard that was found as a record says it is."""
        arrival = self.found.get(shard.key)
        return arrival.light if arrival and arrival.shard == shard else None

    def settle(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._settled.add(key)
            self.found.pop(key, None)
            self.refused.pop(key, None)
            if name := layout.parse_shard(key):
                searcher = name[0]
                while layout.shard(searcher, self._next[searcher]) in self._settled:
                    self._next[searcher] += 1

    def _listed(self) -> Iterator[str]:
        """Searcher by searcher, each from its first shard that is not settled: what is stored is not listed again."""
        for name in self.run.store.folders(layout.TRAJECTORIES):
            folder = f"{layout.TRAJECTORIES}{name}/"
            first = layout.parse_shard(f"{folder}{layout.shard(0, 0).rpartition('/')[2]}")
            settled = self._next[first[0]] if first else 0
            after = layout.shard(first[0], settled - 1) if first and settled else ""
            for entry in self.run.store.list(folder, after=after):
                yield entry.key

    def _known(self, key: str) -> bool:
        return key in self._settled or key in self.found or key in self.refused

    def _judge(self, key: str, data: bytes) -> None:
        try:
            table = read_shard(self.run.name, key, data)
        except Damaged as error:
            self.refused[key] = Refusal(key=key, reason=str(error).removeprefix(f"{key}: "))
            return
        searcher, seq = layout.parse_shard(key) or (0, 0)
        shard = Shard(
            key=key,
            searcher=searcher,
            seq=seq,
            rows=len(table),
            bytes=len(data),
            sha256=sha256(data).hexdigest(),
        )
        self.found[key] = Arrival(shard, table.select(COLUMNS))
        self.payloads.keep(key, table)
