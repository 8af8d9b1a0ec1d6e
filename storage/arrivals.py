"""What has arrived and no record admits yet: found by listing, read once, judged.

A name that is not a shard's, and an object that is not a good shard, are refused, for good. One that is listed and
cannot be read is neither: it is passed over, and asked for again at the next look.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import NamedTuple

import pyarrow as pa

from storage import layout
from storage.index import COLUMNS
from storage.payloads import SIDE_BY_SIDE, Payloads
from storage.run import Run
from storage.syncs import Refusal, Shard
from storage.trajectories import read_shard
from tba.errors import Damaged, StorageError


class Arrival(NamedTuple):
    shard: Shard
    light: pa.Table  # the columns of the index


class Arrivals:
    """`look` finds shards; a record that admits or refuses them settles what becomes of them, for good. `check` raises
    Damaged for a shard that could not be admitted."""

    def __init__(self, run: Run, payloads: Payloads, check: Callable[[pa.Table], None]):
        self.run, self.payloads, self.check = run, payloads, check
        self.found: dict[str, Arrival] = {}
        self.refused: dict[str, Refusal] = {}
        self.unread: dict[str, str] = {}  # why, of each that could not be read at the last look
        self._settled: set[str] = set()
        self._next: defaultdict[int, int] = defaultdict(int)  # by searcher: all before this seq are settled

    def look(self) -> None:
        self.unread.clear()
        for key, data in self._read([key for key in self._listed() if not self._known(key)]):
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
        for folder in self.run.store.folders(layout.TRAJECTORIES):
            searcher = layout.parse_searcher(folder)
            if searcher is None:
                self._refuse(f"{layout.TRAJECTORIES}{folder}/", "not the folder of a searcher")
                continue
            settled = self._next[searcher]
            after = layout.shard(searcher, settled - 1) if settled else ""
            for entry in self.run.store.list(layout.searcher_folder(searcher), after=after):
                if layout.parse_shard(entry.key) is None:
                    self._refuse(entry.key, "not the name of a shard")
                else:
                    yield entry.key

    def _read(self, keys: Sequence[str]) -> Iterator[tuple[str, bytes]]:
        """Objects with their keys, some side by side. Where one fails, each is asked for by itself."""
        for start in range(0, len(keys), SIDE_BY_SIDE):
            batch = keys[start : start + SIDE_BY_SIDE]
            try:
                yield from zip(batch, self.run.store.read_many(batch), strict=True)
            except StorageError:
                with ThreadPoolExecutor(len(batch)) as pool:
                    read = list(zip(batch, pool.map(self._read_one, batch), strict=True))
                yield from ((key, data) for key, data in read if data is not None)
                if not any(data is not None for _, data in read):
                    return  # the store is away: whoever writes next to it says so

    def _read_one(self, key: str) -> bytes | None:
        try:
            return self.run.store.read(key)
        except StorageError as error:
            self.unread[key] = str(error)
            return None

    def _known(self, key: str) -> bool:
        return key in self._settled or key in self.found or key in self.refused

    def _refuse(self, name: str, reason: str) -> None:
        key = name.encode(errors="backslashreplace").decode()  # on a disk a name may be no text
        if not self._known(key):
            self.refused[key] = Refusal(key=key, reason=reason)

    def _judge(self, key: str, data: bytes) -> None:
        try:
            table = read_shard(self.run.name, key, data)
            self.check(table)
        except Damaged as error:
            self._refuse(key, str(error).removeprefix(f"{key}: "))
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
        self.payloads.keep(shard, table, data)
