"""Finds shards that have arrived but that no sync record admits yet. Each shard is listed, read once and checked.

An object that is not a good shard, or that does not have the name of a shard, is refused for good. An object that is
listed but cannot be read is neither found nor refused: it is skipped and read again at the next look.

The cost of a look depends on what is new, not on what is stored. A look asks for the shards after the last settled
shard of each searcher. Searchers number their shards one by one, so a new shard seldom has an earlier name. Such a
shard is found by listing the searcher's folder: at every look while the folder is small, then at every second look,
every third, and so on for each further `SMALL` shards in it, or `LISTED` shards in the folders of all searchers.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from itertools import chain, takewhile
from typing import NamedTuple

import pyarrow as pa

from storage import layout
from storage.log.payloads import Payloads
from storage.log.schema import COLUMNS
from storage.log.shard_checks import read_shard
from storage.log.shard_reader import SIDE_BY_SIDE
from storage.log.sync_records import Refusal, Shard
from storage.runs.run import Run
from tba.errors import Damaged, StorageError

SMALL = 1000
"""A searcher's folder with fewer settled shards than this is listed at every look. One answer of S3 lists this many
names."""

LISTED = 50_000
"""Most settled shards, of all searchers together, whose folders are listed at every look. This bounds the time of a
look if many searchers have small folders."""

_LARGEST = 2**31 - 1  # a seq is a column of 32 bits


class Arrival(NamedTuple):
    shard: Shard
    light: pa.Table  # its columns for the index of the replay buffer


class Seqs:
    """A set of sequence numbers, stored as spans without gaps. It takes little memory if there are few gaps."""

    def __init__(self) -> None:
        self.count = 0
        self._starts: list[int] = []  # ascending; no two spans touch
        self._ends: list[int] = []  # 1 more than the last seq of each span

    def __contains__(self, seq: int) -> bool:
        place = bisect_right(self._starts, seq) - 1
        return place >= 0 and seq < self._ends[place]

    @property
    def first_missing(self) -> int:
        return self._ends[0] if self._starts[:1] == [0] else 0

    @property
    def end(self) -> int:
        """The number after the last seq; 0 for an empty set."""
        return self._ends[-1] if self._ends else 0

    def add(self, seq: int) -> None:
        if seq in self:
            return
        self.count += 1
        place = bisect_right(self._starts, seq)  # the place of the first span after seq
        follows = place > 0 and self._ends[place - 1] == seq
        precedes = place < len(self._starts) and self._starts[place] == seq + 1
        if follows and precedes:
            self._ends[place - 1] = self._ends.pop(place)
            self._starts.pop(place)
        elif follows:
            self._ends[place - 1] += 1
        elif precedes:
            self._starts[place] = seq
        else:
            self._starts.insert(place, seq)
            self._ends.insert(place, seq + 1)


class Arrivals:
    """The shards of a run that no sync record names yet. `look` finds new shards and refuses those that are faulty.
    Call `settle` for the shards that a sync record admits or refuses: they are never read again. `check` gets the rows
    of a shard, and raises Damaged if they cannot be admitted."""

    def __init__(self, run: Run, payloads: Payloads, check: Callable[[pa.Table], None]):
        self.run, self.payloads, self.check = run, payloads, check
        self.found: dict[str, Arrival] = {}
        self.refused: dict[str, Refusal] = {}
        self.unread: dict[str, str] = {}  # by key of an object that could not be read at the last look: the reason
        self._settled: defaultdict[int, Seqs] = defaultdict(Seqs)  # by searcher
        self._strangers: set[str] = set()  # settled keys that are not names of shards
        self._is_local = run.store.local_path(layout.TRAJECTORIES[:-1]) is not None
        self._pause: defaultdict[int, int] = defaultdict(int)  # by searcher: looks until its folder is listed again

    def look(self) -> None:
        keys = dict.fromkeys([*self.unread, *self._listed()])
        self.unread.clear()
        for key, data in self._read([key for key in keys if not self.knows(key)]):
            self._judge(key, data)

    def rows(self) -> int:
        return sum(arrival.shard.rows for arrival in self.found.values())

    def take(self, shard: Shard) -> pa.Table | None:
        """Return the index columns of a shard if it was found and is exactly as `shard`, from a sync record, describes
        it. Otherwise return None."""
        arrival = self.found.get(shard.key)
        return arrival.light if arrival and arrival.shard == shard else None

    def settle(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.found.pop(key, None)
            self.refused.pop(key, None)
            self.unread.pop(key, None)
            if name := layout.parse_shard(key):
                self._settled[name[0]].add(name[1])
            else:
                self._strangers.add(key)

    def _listed(self) -> Iterator[str]:
        listings: list[Callable[[], Sequence[str]]] = []
        settled = sum(seqs.count for seqs in self._settled.values())
        for folder in self.run.store.folders(layout.TRAJECTORIES):
            searcher = layout.parse_searcher(folder)
            if searcher is None:
                self._refuse(f"{layout.TRAJECTORIES}{folder}/", "not the folder of a searcher")
            elif self._pause[searcher] > 0:
                self._pause[searcher] -= 1
                listings.append(partial(self._following, searcher, self._settled[searcher].end))
            else:
                self._pause[searcher] = self._looks_to_pass(searcher, settled)
                listings.append(partial(self._from, searcher, self._settled[searcher].first_missing))
        for key in self._side_by_side(listings):
            if layout.parse_shard(key) is None:
                self._refuse(key, "not the name of a shard")
            else:
                yield key

    def _looks_to_pass(self, searcher: int, settled: int) -> int:
        """Return the number of looks until the folder of a searcher is listed again. `settled` is the number of settled
        shards of all searchers. Folders that are listed at the same look now are listed at different looks later."""
        share = settled // LISTED
        return max(self._settled[searcher].count // SMALL, share + searcher % (share + 1))

    def _side_by_side(self, listings: Sequence[Callable[[], Sequence[str]]]) -> Iterator[str]:
        """Yield the keys of all listings, in order. A remote store answers several listings at the same time."""
        if self._is_local or len(listings) < 2:
            yield from chain.from_iterable(listing() for listing in listings)
            return
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            yield from chain.from_iterable(pool.map(lambda listing: listing(), listings))

    def _following(self, searcher: int, seq: int) -> Sequence[str]:
        """Return the keys of the stored shards from `seq` on; in a local store, only up to the first gap. A local
        folder cannot be listed from a given name on, but asking for single names is fast."""
        if not self._is_local:
            return self._from(searcher, seq)
        keys = (layout.shard(searcher, following) for following in range(seq, _LARGEST + 1))
        return list(takewhile(self.run.store.exists, keys))

    def _from(self, searcher: int, seq: int) -> Sequence[str]:
        after = layout.shard(searcher, seq - 1) if seq else ""
        return [entry.key for entry in self.run.store.list(layout.searcher_folder(searcher), after=after)]

    def _read(self, keys: Sequence[str]) -> Iterator[tuple[str, bytes]]:
        """Yield keys with the bytes of their objects. Several objects are read at the same time. If this fails, each
        object is read by itself, and objects that cannot be read are left out."""
        for start in range(0, len(keys), SIDE_BY_SIDE):
            batch = keys[start : start + SIDE_BY_SIDE]
            try:
                yield from zip(batch, self.run.store.read_many(batch), strict=True)
            except StorageError:
                with ThreadPoolExecutor(len(batch)) as pool:
                    read = list(zip(batch, pool.map(self._read_one, batch), strict=True))
                yield from ((key, data) for key, data in read if data is not None)
                if not any(data is not None for _, data in read):
                    return  # the store cannot be reached: the next write to it raises the error

    def _read_one(self, key: str) -> bytes | None:
        try:
            return self.run.store.read(key)
        except StorageError as error:
            self.unread[key] = str(error)
            return None

    def knows(self, key: str) -> bool:
        """True if a shard was found, refused or settled."""
        name = layout.parse_shard(key)
        settled = name[1] in self._settled[name[0]] if name else key in self._strangers
        return settled or key in self.found or key in self.refused

    def _refuse(self, name: str, reason: str) -> None:
        key = name.encode(errors="backslashreplace").decode()  # a file name need not be valid text
        if not self.knows(key):
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
