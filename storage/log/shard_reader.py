"""Reads rows of admitted shards, from shards that are objects of their own and from compactions, and verifies them.

A shard is an object of its own until it is compacted, and then removed. So if a shard is not found, the reader looks at
the newest records of compactions. In a remote store it does so repeatedly for a while, because listings may be behind.

A shard of up to `WHOLE` bytes is read whole and compared with the sha256 in the record that admits it. One request to a
remote store costs less than several small ones, and the checksum costs less than decoding the rows. Of a larger shard
and of a compaction, only the needed row groups and columns are read. The same holds for any shard on a local disk if
only light columns are needed. Then the number of rows, the run, the searcher and the seq must be as recorded, and every
page must match its checksum.

Both ways find damage, and a shard that is stored under the name of another shard. A forged shard with the right name,
number of rows and size is found only when it is read whole, and by `tba check`. Before a gradient step learns from rows
of a shard, the shard is read whole, unless it is larger than `WHOLE` or lies in a compaction.
"""

import io
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial
from hashlib import sha256
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from storage.local_files.object_cache import Copies
from storage.local_files.regular_files import open_regular
from storage.log.compactions import COLUMNS, Compaction, Compactions, Place
from storage.log.schema import TRAJECTORY_SCHEMA, UNREADABLE, expected_metadata, with_later
from storage.log.sync_records import Shard
from storage.objects.store import Store
from storage.runs.run import Run
from tba.errors import Damaged, Missing, StorageError, TBAError, first_line

log = logging.getLogger(__name__)
A = TypeVar("A")
T = TypeVar("T")
SIDE_BY_SIDE = 32
"""Number of shards that are read from a remote store at the same time."""
WHOLE = 4 << 20
"""Size in bytes of the largest shard that is read whole. Reading this many bytes takes about as long as sending one
more request."""
_FOOTERS = 256 << 20  # maximum bytes of memory for the footers of compactions
_PAUSE = 0.1, 5.0  # seconds between two looks for a shard: the first pause, and the longest
_UNPACKED = 7  # a footer takes this many times its stored size in memory


class Piece(NamedTuple):
    """Consecutive rows of a shard, beginning with row `start`."""

    start: int
    rows: pa.RecordBatch

    def holds(self, row: int) -> bool:
        return self.start <= row < self.start + len(self.rows)


class ShardReader:
    """Finds and reads the rows of admitted shards. Its methods raise Missing or Damaged, naming the shard, if a shard
    does not match its record. From a remote store, data of shards of up to `WHOLE` bytes is kept on disk, up to
    `disk_bytes`; of a shard in a compaction, only the columns that were read are kept."""

    def __init__(self, run: Run, *, disk_bytes: int):
        self.run = run
        self.copies = Copies("shards", disk_bytes)
        self.compactions = Compactions(run)
        self._footers = _Footers(_FOOTERS)

    @cached_property
    def remote(self) -> bool:
        return self.run.store.local_path("trajectories") is None

    def light(self, shards: Iterable[Shard], columns: Sequence[str]) -> Iterator[tuple[Shard, pa.Table]]:
        """Yield each shard with a table of these columns for all its rows, in the order of `shards`."""
        wanted = [(shard, columns) for shard in shards]
        for (shard, _), table in zip(wanted, self._side_by_side(self._light, wanted, on_disk=4), strict=True):
            yield shard, table

    def pieces(self, wanted: Iterable[tuple[Shard, Collection[int]]], columns: Sequence[str]) -> Iterator[list[Piece]]:
        """Yield, for each shard, these columns of the row groups that hold the wanted rows. Shards are in the order of
        `wanted`."""

        def read(shard: Shard, rows: Collection[int]) -> list[Piece]:
            return self._wherever(shard, columns, rows)

        # Only 2 threads on a disk: a gradient step runs at the same time, and all threads compete for the interpreter.
        return self._side_by_side(read, list(wanted), on_disk=2)

    def _side_by_side(
        self, work: Callable[[Shard, A], T], wanted: Sequence[tuple[Shard, A]], *, on_disk: int
    ) -> Iterator[T]:
        """Call `work` for each wanted shard, several at the same time, and yield the results in the order of `wanted`.
        Shards that lie in the same compaction are read one after the other, while its footer is in memory."""
        order = sorted(range(len(wanted)), key=lambda number: self._object_of(wanted[number][0]))
        done: dict[int, T] = {}
        with ThreadPoolExecutor(SIDE_BY_SIDE if self.remote else on_disk) as pool:
            results = zip(order, pool.map(lambda number: work(*wanted[number]), order), strict=True)
            for number in range(len(wanted)):
                while number not in done:
                    done.update([next(results)])
                yield done.pop(number)

    def _object_of(self, shard: Shard) -> str:
        place = self.compactions.place(shard)
        return place.compaction.object if place else ""

    def _light(self, shard: Shard, columns: Sequence[str]) -> pa.Table:
        pieces = self._wherever(shard, columns, None, in_part=not self.remote)
        return pa.Table.from_batches([piece.rows for piece in pieces])

    def _wherever(
        self, shard: Shard, columns: Sequence[str], rows: Collection[int] | None, *, in_part: bool = False
    ) -> list[Piece]:
        """Return these columns of the row groups that hold `rows` of a shard, read from the shard's own object or from
        a compaction. If `rows` is None, return the columns of all rows as one piece."""
        place, pauses = self.compactions.place(shard), self._pauses(shard)
        while True:
            try:
                with self._naming(shard, place):
                    whole = self._copy_of(shard)
                    if place and whole is None:
                        return self._compacted(place, columns, rows)
                    with self._opened(shard, whole, in_part=in_part) as file:
                        return _pieces(file, range(file.num_row_groups), columns, rows)
            except (Missing, Damaged) as error:
                known, place = place, self.compactions.place_now(shard, place)
                if place == known and (isinstance(error, Damaged) or next(pauses, None) is None):
                    raise

    def _pauses(self, shard: Shard) -> Iterator[float]:
        """Wait before each new look for a shard that was not found, until `store_deadline` is over, because the listing
        of a remote store may be behind. For a local store, do not wait and yield nothing."""
        if not self.remote:
            return
        patience, pause = self.run.store_deadline, _PAUSE[0]
        log.warning("%s/%s was not found; trying again for up to %g s", self.run.url, shard.key, patience)
        ends = time.monotonic() + patience
        while time.monotonic() + pause < ends:
            time.sleep(pause)
            yield pause
            pause = min(2 * pause, _PAUSE[1])

    def _compacted(self, place: Place, columns: Sequence[str], rows: Collection[int] | None) -> list[Piece]:
        """Return pieces of a shard in a compaction. If the compaction is remote and the shard not larger than `WHOLE`,
        all rows of the shard are requested at once, and a copy of them is kept."""
        shard, groups = place.part.shard, place.part.groups
        if not (self.remote and self.copies.limit and shard.bytes <= WHOLE):
            with self._compaction(place) as file:
                return _pieces(file, groups, columns, rows)
        name = _name_of_copy(place, columns, in_one_piece=rows is None)
        data = self.copies.read_made(name)
        if data is not None:
            pieces = _decoded(data)
        else:
            with self._compaction(place) as file:
                pieces = _pieces(file, groups, columns, None if rows is None else range(shard.rows))
            self.copies.keep_made(name, _encoded(pieces))
        return [piece for piece in pieces if rows is None or any(map(piece.holds, rows))]

    def _compaction(self, place: Place) -> pq.ParquetFile:
        compaction, part = place
        source = partial(self._source, compaction.object, compaction.bytes)
        footer = self._footers.get(compaction, lambda: pq.read_metadata(source()))
        file = pq.ParquetFile(source(), metadata=footer, pre_buffer=self.remote, page_checksum_verification=True)
        if (file.metadata.metadata or {}).get(b"run") != self.run.writer_of(compaction.object).encode():
            raise ValueError("it belongs to another run")
        if file.num_row_groups != compaction.parts[-1].end_group:
            raise ValueError(f"it has {file.num_row_groups} row groups, not {compaction.parts[-1].end_group}")
        if any(_whose(file.metadata, group) != (part.shard.searcher, part.shard.seq) for group in part.groups):
            raise ValueError("its row groups belong to another shard")
        if sum(file.metadata.row_group(group).num_rows for group in part.groups) != part.shard.rows:
            raise ValueError(f"its row groups do not have {part.shard.rows} rows")
        return file

    def _opened(self, shard: Shard, whole: bytes | None, *, in_part: bool) -> pq.ParquetFile:
        if not in_part and shard.bytes <= WHOLE:
            return pq.ParquetFile(pa.BufferReader(self._whole(shard) if whole is None else whole))
        source = self._source(shard.key, shard.bytes)
        file = pq.ParquetFile(source, pre_buffer=self.remote, page_checksum_verification=True)
        expected = expected_metadata(self.run.writer_of(shard.key), shard.searcher, shard.seq)
        found = file.metadata.metadata or {}
        if file.metadata.num_rows != shard.rows or any(found.get(key) != value for key, value in expected.items()):
            raise Damaged(f"{self.run.url}/{shard.key} is not the shard that was admitted: it is another shard")
        return file

    def _whole(self, shard: Shard) -> bytes:
        data = self.run.store.read(shard.key)
        if sha256(data).hexdigest() != shard.sha256:
            raise Damaged(f"{self.run.url}/{shard.key} is not the shard that was admitted: its sha256 differs")
        self.copy(shard, data)
        return data

    def _copy_of(self, shard: Shard) -> bytes | None:
        return self.copies.read(shard.sha256) if self.remote and shard.bytes <= WHOLE else None

    def copy(self, shard: Shard, data: bytes) -> None:
        """Keep a copy of a shard's bytes on disk, so that the shard need not be requested again. Do nothing if the
        store is local or the shard is larger than `WHOLE`."""
        if self.remote and shard.bytes <= WHOLE:
            self.copies.keep(shard.sha256, data)

    def _source(self, key: str, size: int) -> Any:
        path = self.run.store.local_path(key)
        if path is None:
            return pa.PythonFile(_Object(self.run.store, key, size), "r")
        with open_regular(path) as file:
            found = os.fstat(file.fileno()).st_size
        if found != size:
            raise Damaged(f"{self.run.url}/{key} has {found} bytes, but its record says {size}")
        return str(path)

    @contextmanager
    def _naming(self, shard: Shard, place: Place | None) -> Iterator[None]:
        """Convert an error of the block, which reads a shard, into an error of this project that names the shard."""
        within = f" in {place.compaction.object}" if place else ""
        name = f"{self.run.url}/{shard.key}{within}"
        try:
            yield
        except TBAError:
            raise
        except FileNotFoundError:
            raise Missing(f"{name} does not exist") from None
        except UNREADABLE as error:
            if isinstance(error, OSError) and error.errno:  # an error of the disk; pyarrow's own errors have no number
                raise StorageError(f"{name}: {error.strerror}") from error
            why = first_line(error)[:200]
            raise Damaged(f"{name} is not the shard that was admitted: {why}") from None


class _Footers:
    """Footers of compactions. The most recently used ones stay in memory. If several threads need the same footer, one
    reads it and the others wait."""

    def __init__(self, limit: int):
        self.limit, self.nbytes = limit, 0
        self._kept: OrderedDict[str, pq.FileMetaData] = OrderedDict()  # by sha256 of the object, the newest last
        self._reading: dict[str, Lock] = {}
        self._changing = Lock()

    def get(self, compaction: Compaction, read: Callable[[], pq.FileMetaData]) -> pq.FileMetaData:
        with self._changing:
            reading = self._reading.setdefault(compaction.sha256, Lock())
        with reading:
            with self._changing:
                footer = self._kept.get(compaction.sha256)
            if footer is None:
                footer = read()
            self._keep(compaction.sha256, footer)
            return footer

    def _keep(self, digest: str, footer: pq.FileMetaData) -> None:
        with self._changing:
            if digest not in self._kept:
                self._kept[digest] = footer
                self.nbytes += _UNPACKED * footer.serialized_size
            self._kept.move_to_end(digest)
            while self.nbytes > self.limit and len(self._kept) > 1:
                self.nbytes -= _UNPACKED * self._kept.popitem(last=False)[1].serialized_size


def _whose(footer: pq.FileMetaData, group: int) -> tuple[int, int] | None:
    """Return searcher and seq of the rows in a row group of a compaction. Return None if the rows belong to several
    shards, or if the footer does not say."""
    shared = []
    for name in ("searcher", "seq"):
        statistics = footer.row_group(group).column(COLUMNS.get_field_index(name)).statistics
        if statistics is None or statistics.min != statistics.max:
            return None
        shared.append(statistics.min)
    return shared[0], shared[1]


def _pieces(
    file: pq.ParquetFile, groups: Sequence[int], columns: Sequence[str], rows: Collection[int] | None
) -> list[Piece]:
    """Return one piece for each row group that holds any of these rows. If `rows` is None, return one piece of all row
    groups."""
    if rows is None:
        return [Piece(0, to_batch(_read(file, groups, columns), columns))]
    pieces, start = [], 0
    for group in groups:
        end = start + file.metadata.row_group(group).num_rows
        if any(start <= row < end for row in rows):
            pieces.append(Piece(start, to_batch(_read(file, [group], columns), columns)))
        start = end
    return pieces


def _read(file: pq.ParquetFile, groups: Sequence[int], columns: Sequence[str]) -> pa.Table:
    """Return these columns of row groups. Also check the number of rows and the types, which page checksums do not
    cover."""
    table = file.read_row_groups(groups, list(columns), use_threads=False)
    if len(table) != (said := sum(file.metadata.row_group(group).num_rows for group in groups)):
        raise ValueError(f"its row groups have {len(table)} rows, but its metadata says {said}")
    table = with_later(table, columns)
    for name in columns:
        if table[name].type != TRAJECTORY_SCHEMA.field(name).type:
            raise ValueError(f"column {name!r} is {table[name].type}, not {TRAJECTORY_SCHEMA.field(name).type}")
    return table


def _name_of_copy(place: Place, columns: Sequence[str], *, in_one_piece: bool) -> str:
    """Return the name of a copy. It depends on the shard, the compaction and the columns, and on whether the rows are
    one piece."""
    how = sha256(f"{in_one_piece} {' '.join(columns)}".encode()).hexdigest()[:8]
    return f"{place.part.shard.sha256}-{place.compaction.sha256}-{how}"


def _encoded(pieces: Sequence[Piece]) -> bytes:
    """Encode pieces as an Arrow stream, which is read in a fraction of the time that Parquet takes."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pieces[0].rows.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        for piece in pieces:
            writer.write_batch(piece.rows)
    return sink.getvalue().to_pybytes()


def _decoded(data: bytes) -> list[Piece]:
    pieces, start = [], 0
    for rows in pa.ipc.open_stream(data):
        pieces.append(Piece(start, rows))
        start += len(rows)
    return pieces


class _Object(io.RawIOBase):
    """A remote object as a file. Only the bytes that are read are requested from the store."""

    def __init__(self, store: Store, key: str, size: int):
        self._store, self._key, self._size, self._place = store, key, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        self._place = start + offset
        return self._place

    def read(self, size: int = -1) -> bytes:
        length = self._size - self._place if size < 0 else min(size, self._size - self._place)
        data = self._store.read_range(self._key, self._place, length) if length > 0 else b""
        self._place += len(data)
        return data


def to_batch(table: pa.Table, columns: Sequence[str]) -> pa.RecordBatch:
    """Return these columns of all rows of the table as one batch."""
    schema = pa.schema([TRAJECTORY_SCHEMA.field(name) for name in columns])
    return pa.RecordBatch.from_arrays([table[name].combine_chunks() for name in columns], schema=schema)
