"""The replay log: a searcher appends shards, and whoever reads one learns whether it can be trusted."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from hashlib import sha256
from itertools import count

import numpy as np
import pyarrow as pa

from storage import layout
from storage.log.compactions import PAYLOAD
from storage.log.payloads import ShardReader
from storage.log.schema import (
    LATER,
    SCHEMA_VERSION,
    TRAJECTORY_SCHEMA,
    UNREADABLE,
    VERSIONS,
    content_hashes,
    decode,
    encode,
    expected_metadata,
    to_table,
    trajectory_ids,
)
from storage.log.syncs import named_shards
from storage.runs.run import Run
from tba.errors import AlreadyExists, Damaged, DataError, Missing, Superseded, first_line
from tba.types import Asked, Trajectory

LARGEST_REWARD = 1e100
"""In size. Far beyond it, inverse temperature times reward is no longer a number."""

_TYPES = {field.name: field.type for field in TRAJECTORY_SCHEMA}
_NUMBERED = ("round", "slot", *(f"{name}{of}" for name in VERSIONS for of in ("", "_attempt")))
_CALENDAR = tuple(pa.scalar(day, pa.timestamp("us")).value for day in (datetime.min, datetime.max))


class Trajectories:
    """The `TrajectoryLog` of a run."""

    def __init__(self, run: Run):
        self.run = run
        self.reader = ShardReader(run, disk_bytes=0)
        self.compactions = self.reader.compactions
        self._taken: dict[int, int] = {}  # by searcher that began here: the last seq that may be taken

    def next_seq(self, searcher: int) -> int:
        """Return the first free seq beyond all that records name: no record names any seq after it either."""
        entries = self.run.store.list(layout.searcher_folder(searcher))
        self.compactions.look()  # afterwards: what has been taken in since is in both
        stored = _seqs_of(searcher, {*(entry.key for entry in entries), *self.compactions.shards()})
        named = _seqs_of(searcher, named_shards(self.run))
        free = (seq for seq in count(1 + max(named, default=-1)) if seq not in stored)
        first = next(seq for seq in free if not self.run.store.exists(layout.shard(searcher, seq)))
        self._taken[searcher] = max([first, *stored])  # also the first: what was listed may have been behind
        return first

    def asked(self, searcher: int, seqs: Iterable[int]) -> list[Asked]:
        return [it for seq in seqs for it in self._asked(layout.shard(searcher, seq))]

    def _asked(self, key: str) -> list[Asked]:
        try:
            table = read_shard(self.run.writer_of(key), key, self.run.store.read(key))
        except Damaged:  # nobody admits it either
            return []
        except Missing:
            self.compactions.look()
            if (shard := self.compactions.shards().get(key)) is None:
                return []
            [(_, table)] = self.reader.light([shard], Asked._fields)
        return [Asked(**row) for row in table.select(Asked._fields).to_pylist()]

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
            _check_values(_columns(table))
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


def _seqs_of(searcher: int, keys: Iterable[str]) -> set[int]:
    names = (layout.parse_shard(key) for key in keys)
    return {name[1] for name in names if name and name[0] == searcher}


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
        columns = _columns(table)
        lost = columns["response_tokens"].is_null()
        with _naming_nonsense():
            if any(not columns[name].is_null().equals(lost) for name in PAYLOAD):
                raise _Fault(f"it has rows with a part of {', '.join(PAYLOAD)}")
            kept = table.filter(columns["response_tokens"].is_valid())
            if len(table) - len(kept) != given_up:
                raise _Fault(f"{len(table) - len(kept)} of its rows lack their payload, not {given_up}")
            _check_nulls({name: column for name, column in columns.items() if name not in PAYLOAD})
            _check_names(columns, *_name(key))
            if len(kept):
                columns = _columns(kept)
                _check_values(columns)
                _check_hashes(columns)
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
        raise _Fault(f"not a readable Parquet object ({first_line(error)[:200]})") from None


def _check(table: pa.Table, run: str, searcher: int, seq: int) -> None:
    _check_metadata(table, run, searcher, seq)
    columns = _columns(table)
    _check_values(columns)
    with _naming_nonsense():
        _check_names(columns, searcher, seq)
        _check_hashes(columns)


def _columns(table: pa.Table) -> dict[str, pa.Array]:
    """Those of the schema, each in one piece; a fault if one is not there or of another type."""
    _check_schema(table)
    with _naming_nonsense():
        return {name: table[name].combine_chunks() for name in _TYPES}


def _check_values(columns: Mapping[str, pa.Array]) -> None:
    """What `to_table` leaves open."""
    with _naming_nonsense():
        _check_nulls(columns)
        _check_lengths(columns)
        _check_numbers(columns)


@contextmanager
def _naming_nonsense() -> Iterator[None]:
    try:
        yield
    except UNREADABLE as error:
        raise _Fault(f"it has values that are none ({first_line(error)[:200]})") from None


def _check_metadata(table: pa.Table, run: str, searcher: int, seq: int) -> None:
    found = table.schema.metadata or {}
    for field, expected in expected_metadata(run, searcher, seq).items():
        value = found.get(field)
        if value != expected:
            said = "nothing" if value is None else repr(value.decode(errors="replace"))
            raise _Fault(f"its metadata says {said} of {field.decode()!r}, not {expected.decode()!r}")


def _check_schema(table: pa.Table) -> None:
    names = Counter(table.column_names)
    if twice := [name for name, times in names.items() if times > 1]:
        raise _Fault(f"it has column {min(twice)!r} more than once")
    types = dict(zip(names, table.schema.types, strict=True))
    for name, expected in _TYPES.items():
        if name not in types:
            raise _Fault(f"it has no column {name!r}")
        if types[name] != expected:
            raise _Fault(f"column {name!r} is {types[name]}, not {expected}")
    if not len(table):
        raise _Fault("it has no rows")


def _check_names(columns: Mapping[str, pa.Array], searcher: int, seq: int) -> None:
    expected_ids = trajectory_ids(searcher, seq, len(columns["trajectory_id"]))
    if columns["trajectory_id"].to_pylist() != expected_ids:
        raise _Fault(f"its trajectories are not numbered {expected_ids[0]} and on")
    for name, expected in (("searcher", searcher), ("schema_version", SCHEMA_VERSION)):
        if (columns[name].to_numpy() != expected).any():
            raise _Fault(f"column {name!r} is not {expected} throughout")


def _check_hashes(columns: Mapping[str, pa.Array]) -> None:
    if content_hashes(columns) != columns["content_hash"].to_pylist():
        raise _Fault("column 'content_hash' disagrees with the tokens")


def _check_nulls(columns: Mapping[str, pa.Array]) -> None:
    for name, column in columns.items():
        missing = column.null_count and name not in LATER
        if missing or (pa.types.is_list(column.type) and column.flatten().null_count):
            raise _Fault(f"column {name!r} has missing values")


def _check_lengths(columns: Mapping[str, pa.Array]) -> None:
    length_B = columns["length"].to_numpy()
    for name in ("response_tokens", "behaviour_logps", "ref_logps"):
        if not np.array_equal(columns[name].value_lengths().to_numpy(), length_B):
            raise _Fault(f"the lengths of {name!r} disagree with column 'length'")
    mask = columns["loss_mask"]
    has_mask_B = mask.is_valid().to_numpy(zero_copy_only=False)
    if not np.array_equal(mask.drop_null().value_lengths().to_numpy(), length_B[has_mask_B]):
        raise _Fault("the lengths of 'loss_mask' disagree with column 'length'")
    _check_steps(columns["step_ends"], columns["step_values"], length_B)
    if not columns["prompt_tokens"].value_lengths().to_numpy().all():
        raise _Fault("a prompt has no tokens")


def _check_steps(ends: pa.Array, values: pa.Array, length_B: np.ndarray) -> None:
    stored = ends.is_valid()
    if not (stored.equals(values.is_valid()) and ends.value_lengths().equals(values.value_lengths())):
        raise _Fault("the lengths of 'step_values' disagree with column 'step_ends'")
    length_M = length_B[stored.to_numpy(zero_copy_only=False)]
    ends_N, steps_M = ends.flatten().to_numpy(), ends.drop_null().value_lengths().to_numpy()
    last_M = np.cumsum(steps_M) - 1
    if not steps_M.all() or not np.array_equal(ends_N[last_M], length_M):
        raise _Fault("the steps of 'step_ends' do not end with the response")
    sizes_N = np.diff(ends_N, prepend=0)
    sizes_N[last_M[:-1] + 1] = ends_N[last_M[:-1] + 1]
    if (sizes_N < 1).any():
        raise _Fault("column 'step_ends' has a step without tokens")


def _check_numbers(columns: Mapping[str, pa.Array]) -> None:
    for name, column in columns.items():
        values = _floats(column)
        if values is not None and not np.isfinite(values).all():
            raise _Fault(f"column {name!r} has a number that is not finite")
    if np.abs(columns["reward"].to_numpy()).max() > LARGEST_REWARD:
        raise _Fault(f"a reward is beyond {LARGEST_REWARD:g}")
    microseconds_B = columns["created_at"].cast(pa.int64()).to_numpy()
    if ((microseconds_B < _CALENDAR[0]) | (microseconds_B > _CALENDAR[1])).any():
        raise _Fault("column 'created_at' has a time beyond all calendars")
    for name in _NUMBERED:
        if (columns[name].to_numpy() < 0).any():
            raise _Fault(f"column {name!r} has a number below 0")
    for name in ("prompt_tokens", "response_tokens"):
        if (columns[name].flatten().to_numpy() < 0).any():
            raise _Fault(f"column {name!r} has a negative token")


def _floats(column: pa.Array) -> np.ndarray | None:
    """The floating-point numbers in a column, whatever it nests them in; None if it holds no such."""
    if pa.types.is_map(column.type):
        column = column.items
    elif pa.types.is_list(column.type):
        column = column.flatten()
    return column.to_numpy(zero_copy_only=False) if pa.types.is_floating(column.type) else None
