"""The replay log: a searcher appends shards, and whoever reads one learns whether it can be trusted."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from hashlib import sha256
from itertools import count

import numpy as np
import pyarrow as pa

from storage import layout
from storage.compactions import PAYLOAD, Compactions
from storage.run import Run
from storage.schema import (
    SCHEMA_VERSION,
    TRAJECTORY_SCHEMA,
    UNREADABLE,
    VERSIONS,
    content_hashes,
    decode,
    encode,
    expected_metadata,
    flat,
    to_table,
    trajectory_ids,
)
from tba.errors import AlreadyExists, Damaged, DataError, Missing, Superseded
from tba.types import Trajectory

LARGEST_REWARD = 1e100
"""In size. Far beyond it, inverse temperature times reward is no longer a number."""

_NUMBERED = ("round", "slot", *(f"{name}{of}" for name in VERSIONS for of in ("", "_attempt")))


_CALENDAR = tuple(pa.scalar(day, pa.timestamp("us")).value for day in (datetime.min, datetime.max))


class Trajectories:
    """The `TrajectoryLog` of a run. A round is one shard, whose seq is the round's number."""

    def __init__(self, run: Run):
        self.run = run
        self.compactions = Compactions(run)
        self._taken: dict[int, int] = {}  # by searcher that began here: the last round whose name may be taken

    def next_round(self, searcher: int) -> int:
        entries = self.run.store.list(layout.searcher_folder(searcher))
        self.compactions.look()  # afterwards: what has been taken in since is in both
        keys = {*(entry.key for entry in entries), *self.compactions.shards()}
        names = [name for key in keys if (name := layout.parse_shard(key))]
        stored = {seq for owner, seq in names if owner == searcher}
        free = (round for round in count() if round not in stored)
        first = next(round for round in free if not self.run.store.exists(layout.shard(searcher, round)))
        self._taken[searcher] = max([first, *stored])  # also the first: what was listed may have been behind
        return first

    def append(self, searcher: int, seq: int, trajectories: Sequence[Trajectory]) -> str:
        """As the protocol says. What the buffer would refuse is not stored: DataError says why."""
        if not trajectories:
            raise ValueError(f"searcher {searcher}, seq {seq}: a shard needs at least 1 trajectory, got 0")
        strangers = {t.searcher for t in trajectories} - {searcher}
        if strangers:
            raise ValueError(f"searcher {searcher} cannot append trajectories of searcher {strangers.pop()}")
        key = layout.shard(searcher, seq)
        table, data = self._encoded(key, trajectories)
        is_new = searcher in self._taken and seq > self._taken[searcher]
        if is_new:  # until it is tried again, when the answer to this was lost
            self._taken[searcher] = seq
        try:
            self.run.store.create(key, data)
        except AlreadyExists:
            if not (self._holds(key, table, data) or self._compacted(key) == sha256(data).hexdigest()):
                raise self._another_incarnation(key) from None
        else:
            if not is_new and (digest := self._compacted(key)):  # so its name had become free
                self.run.store.delete(key)
                if digest != sha256(data).hexdigest():
                    raise self._another_incarnation(key)
        return key

    def _encoded(self, key: str, trajectories: Sequence[Trajectory]) -> tuple[pa.Table, bytes]:
        """Better that the searcher stops than that every round of it is refused where nobody waits for it."""
        searcher, seq = _name(key)
        try:
            table = to_table(trajectories, run=self.run.name, searcher=searcher, seq=seq)
            _check_values(table)
            return table, encode(table)
        except (DataError, _Fault) as fault:
            raise DataError(
                f"{self.run.url}/{key}: {fault}; it was not stored, the replay buffer would refuse it"
            ) from None

    def _compacted(self, key: str) -> str | None:
        """The sha256 of the shard of this name that a compaction has taken in, if one has."""
        self.compactions.look()
        shard = self.compactions.shards().get(key)
        return shard.sha256 if shard else None

    def _another_incarnation(self, key: str) -> Superseded:
        searcher, _ = _name(key)
        return Superseded(f"{self.run.url}/{key} holds other trajectories: searcher {searcher} has another incarnation")

    def _holds(self, key: str, table: pa.Table, data: bytes) -> bool:
        try:
            stored = self.run.store.read(key)
        except Missing:  # a compaction has just taken it in
            return False
        if stored == data:
            return True
        try:  # another version of the Parquet library writes other bytes
            return read_shard(self.run.name, key, stored).equals(table)
        except Damaged:
            return False


def read_shard(run: str, key: str, data: bytes) -> pa.Table:
    """The table of a shard that is whole, sane, and of this run and schema; Damaged, naming key and fault, if not.
    Whatever the buffer and its draws make of the rows can be made of them."""
    try:
        name = _name(key)
        table = _decoded(data)
        _check(table, run, *name)
        return table
    except _Fault as fault:
        raise Damaged(f"{key}: {fault}") from None


def check_compacted(table: pa.Table, key: str, *, given_up: int) -> None:
    """That these rows are those of a shard which a compaction has taken in, of which so many have lost their payload;
    Damaged, naming key and fault, if not."""
    try:
        _check_schema(table)
        lost = table["response_tokens"].is_null()
        with _naming_nonsense():
            if any(not table[name].is_null().equals(lost) for name in PAYLOAD):
                raise _Fault(f"it has rows with a part of {', '.join(PAYLOAD)}")
            kept = table.filter(table["response_tokens"].is_valid())
            if len(table) - len(kept) != given_up:
                raise _Fault(f"{len(table) - len(kept)} of its rows lack their payload, not {given_up}")
            _check_nulls(table, [name for name in TRAJECTORY_SCHEMA.names if name not in PAYLOAD])
            _check_names(table, *_name(key))
            if len(kept):
                _check_values(kept)
                _check_hashes(kept)
    except _Fault as fault:
        raise Damaged(f"{key}: {fault}") from None


class _Fault(Exception): ...


def _name(key: str) -> tuple[int, int]:
    name = layout.parse_shard(key)
    if name is None:
        raise _Fault("not the name of a shard")
    return name


def _decoded(data: bytes) -> pa.Table:
    try:
        table = decode(data)
        table.validate(full=True)
        return table
    except UNREADABLE as error:
        raise _Fault(f"not a readable Parquet object ({_first_line(error)})") from None


def _check(table: pa.Table, run: str, searcher: int, seq: int) -> None:
    _check_metadata(table, run, searcher, seq)
    _check_schema(table)
    _check_values(table)
    with _naming_nonsense():
        _check_names(table, searcher, seq)
        _check_hashes(table)


def _check_values(table: pa.Table) -> None:
    """What `to_table` leaves open."""
    with _naming_nonsense():
        _check_nulls(table, TRAJECTORY_SCHEMA.names)
        _check_lengths(table)
        _check_numbers(table)


@contextmanager
def _naming_nonsense() -> Iterator[None]:
    try:
        yield
    except UNREADABLE as error:
        raise _Fault(f"it has values that are none ({_first_line(error)})") from None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]


def _check_metadata(table: pa.Table, run: str, searcher: int, seq: int) -> None:
    found = table.schema.metadata or {}
    for field, expected in expected_metadata(run, searcher, seq).items():
        value = found.get(field)
        if value != expected:
            said = "nothing" if value is None else repr(value.decode(errors="replace"))
            raise _Fault(f"its metadata says {said} of {field.decode()!r}, not {expected.decode()!r}")


def _check_schema(table: pa.Table) -> None:
    if twice := {name for name in table.column_names if table.column_names.count(name) > 1}:
        raise _Fault(f"it has column {min(twice)!r} more than once")
    for field in TRAJECTORY_SCHEMA:
        if field.name not in table.column_names:
            raise _Fault(f"it has no column {field.name!r}")
        found = table.schema.field(field.name).type
        if found != field.type:
            raise _Fault(f"column {field.name!r} is {found}, not {field.type}")
    if not len(table):
        raise _Fault("it has no rows")


def _check_names(table: pa.Table, searcher: int, seq: int) -> None:
    expected_ids = trajectory_ids(searcher, seq, len(table))
    if table["trajectory_id"].to_pylist() != expected_ids:
        raise _Fault(f"its trajectories are not numbered {expected_ids[0]} and on")
    for column, expected in (("searcher", searcher), ("schema_version", SCHEMA_VERSION)):
        if set(table[column].to_pylist()) != {expected}:
            raise _Fault(f"column {column!r} is not {expected} throughout")


def _check_hashes(table: pa.Table) -> None:
    if content_hashes(table) != table["content_hash"].to_pylist():
        raise _Fault("column 'content_hash' disagrees with the tokens")


def _check_nulls(table: pa.Table, columns: Sequence[str]) -> None:
    for column in columns:
        array = table[column].combine_chunks()
        if array.null_count or (pa.types.is_list(array.type) and array.flatten().null_count):
            raise _Fault(f"column {column!r} has missing values")


def _check_lengths(table: pa.Table) -> None:
    length_B = table["length"].to_numpy()
    for column in ("response_tokens", "behaviour_logps", "ref_logps"):
        if not np.array_equal(_lengths(table, column), length_B):
            raise _Fault(f"the lengths of {column!r} disagree with column 'length'")
    if not _lengths(table, "prompt_tokens").all():
        raise _Fault("a prompt has no tokens")


def _check_numbers(table: pa.Table) -> None:
    for column in TRAJECTORY_SCHEMA.names:
        values = _floats(table[column].combine_chunks())
        if values is not None and not np.isfinite(values).all():
            raise _Fault(f"column {column!r} has a number that is not finite")
    if np.abs(table["reward"].to_numpy()).max() > LARGEST_REWARD:
        raise _Fault(f"a reward is beyond {LARGEST_REWARD:g}")
    microseconds_B = table["created_at"].cast(pa.int64()).to_numpy()
    if ((microseconds_B < _CALENDAR[0]) | (microseconds_B > _CALENDAR[1])).any():
        raise _Fault("column 'created_at' has a time beyond all calendars")
    for column in _NUMBERED:
        if (table[column].to_numpy() < 0).any():
            raise _Fault(f"column {column!r} has a number below 0")
    for column in ("prompt_tokens", "response_tokens"):
        if (flat(table[column])[0] < 0).any():
            raise _Fault(f"column {column!r} has a negative token")


def _lengths(table: pa.Table, column: str) -> np.ndarray:
    return table[column].combine_chunks().value_lengths().to_numpy()


def _floats(array: pa.Array) -> np.ndarray | None:
    """The floating-point numbers in a column, whatever it nests them in; None if it holds no such."""
    if pa.types.is_map(array.type):
        array = array.items
    elif pa.types.is_list(array.type):
        array = array.flatten()
    return array.to_numpy(zero_copy_only=False) if pa.types.is_floating(array.type) else None
