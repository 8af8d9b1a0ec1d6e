"""Decodes a shard and checks that its rows can be used."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime

import numpy as np
import pyarrow as pa

from storage import layout
from storage.log.compactions import PAYLOAD
from storage.log.schema import (
    LATER,
    SCHEMA_VERSION,
    TRAJECTORY_SCHEMA,
    UNREADABLE,
    VERSIONS,
    content_hashes,
    decode,
    expected_metadata,
    trajectory_ids,
)
from tba.errors import Damaged, first_line

LARGEST_REWARD = 1e100
"""Largest allowed absolute value of a reward. With much larger rewards, the inverse temperature times the reward could
overflow."""
_TYPES = {field.name: field.type for field in TRAJECTORY_SCHEMA}
_NUMBERED = ("round", "slot", *(f"{name}{of}" for name in VERSIONS for of in ("", "_attempt")))
_CALENDAR = tuple(pa.scalar(day, pa.timestamp("us")).value for day in (datetime.min, datetime.max))


def read_shard(run: str, key: str, data: bytes) -> pa.Table:
    """Return the table of a shard. Raise Damaged, naming the key and the fault, if `data` is not a readable shard of
    `TRAJECTORY_SCHEMA`, if it belongs to another run or key, or if it has values that the replay buffer cannot work
    with."""
    try:
        name = parse_name(key)
        table = _decoded(data)
        _check(table, run, *name)
        return table
    except ShardFault as fault:
        raise Damaged(f"{key}: {fault}") from None


def check_compacted(table: pa.Table, key: str, *, given_up: int) -> None:
    """Check the rows of a shard as a compaction holds them. Raise Damaged, naming the key and the fault, unless exactly
    `given_up` rows have lost their payload and all other values are valid."""
    try:
        columns = columns_of(table)
        lost = columns["response_tokens"].is_null()
        with _naming_nonsense():
            payload = [name for name in PAYLOAD if not _is_optional(name, columns[name])]
            if any(not columns[name].is_null().equals(lost) for name in payload):
                raise ShardFault(f"it has rows with only some of {', '.join(PAYLOAD)}")
            kept = table.filter(columns["response_tokens"].is_valid())
            if len(table) - len(kept) != given_up:
                raise ShardFault(f"{len(table) - len(kept)} of its rows lack their payload, not {given_up}")
            _check_nulls({name: column for name, column in columns.items() if name not in PAYLOAD})
            _check_names(columns, *parse_name(key))
            if len(kept):
                columns = columns_of(kept)
                check_values(columns)
                _check_hashes(columns)
    except ShardFault as fault:
        raise Damaged(f"{key}: {fault}") from None


class ShardFault(Exception): ...


def parse_name(key: str) -> tuple[int, int]:
    name = layout.parse_shard(key)
    if name is None:
        raise ShardFault("not the name of a shard")
    return name


def _decoded(data: bytes) -> pa.Table:
    try:
        table = decode(data)
        table.validate(full=True)
        return table
    except UNREADABLE as error:
        raise ShardFault(f"not a readable Parquet object ({first_line(error)[:200]})") from None


def _check(table: pa.Table, run: str, searcher: int, seq: int) -> None:
    _check_metadata(table, run, searcher, seq)
    columns = columns_of(table)
    check_values(columns)
    with _naming_nonsense():
        _check_names(columns, searcher, seq)
        _check_hashes(columns)


def columns_of(table: pa.Table) -> dict[str, pa.Array]:
    """Return the columns of `TRAJECTORY_SCHEMA`, each in one piece. Raise ShardFault if a column is missing, occurs
    twice or has another type, or if there are no rows."""
    _check_schema(table)
    with _naming_nonsense():
        return {name: table[name].combine_chunks() for name in _TYPES}


def check_values(columns: Mapping[str, pa.Array]) -> None:
    """Raise ShardFault if a value is missing, if lengths do not match, or if a number is out of its range. `to_table`
    does not check this."""
    with _naming_nonsense():
        _check_nulls(columns)
        _check_lengths(columns)
        _check_numbers(columns)


@contextmanager
def _naming_nonsense() -> Iterator[None]:
    try:
        yield
    except UNREADABLE as error:
        raise ShardFault(f"it has values that cannot be read ({first_line(error)[:200]})") from None


def _check_metadata(table: pa.Table, run: str, searcher: int, seq: int) -> None:
    found = table.schema.metadata or {}
    for field, expected in expected_metadata(run, searcher, seq).items():
        value = found.get(field)
        if value != expected:
            said = "nothing" if value is None else repr(value.decode(errors="replace"))
            raise ShardFault(f"its metadata says {said} of {field.decode()!r}, not {expected.decode()!r}")


def _check_schema(table: pa.Table) -> None:
    names = Counter(table.column_names)
    if twice := [name for name, times in names.items() if times > 1]:
        raise ShardFault(f"it has column {min(twice)!r} more than once")
    types = dict(zip(names, table.schema.types, strict=True))
    for name, expected in _TYPES.items():
        if name not in types:
            raise ShardFault(f"it has no column {name!r}")
        if types[name] != expected:
            raise ShardFault(f"column {name!r} is {types[name]}, not {expected}")
    if not len(table):
        raise ShardFault("it has no rows")


def _check_names(columns: Mapping[str, pa.Array], searcher: int, seq: int) -> None:
    expected_ids = trajectory_ids(searcher, seq, len(columns["trajectory_id"]))
    if columns["trajectory_id"].to_pylist() != expected_ids:
        raise ShardFault(f"its trajectories are not numbered from {expected_ids[0]} on")
    for name, expected in (("searcher", searcher), ("schema_version", SCHEMA_VERSION)):
        if (columns[name].to_numpy() != expected).any():
            raise ShardFault(f"column {name!r} is not {expected} in every row")


def _check_hashes(columns: Mapping[str, pa.Array]) -> None:
    if content_hashes(columns) != columns["content_hash"].to_pylist():
        raise ShardFault("column 'content_hash' does not match the tokens")


def _is_optional(name: str, column: pa.Array) -> bool:
    """True for columns that may be null, and for `ref_logps` if it is null in every row: then the run does not compute
    it."""
    return name in LATER or (name == "ref_logps" and column.null_count == len(column))


def _check_nulls(columns: Mapping[str, pa.Array]) -> None:
    for name, column in columns.items():
        missing = column.null_count and not _is_optional(name, column)
        if missing or (pa.types.is_list(column.type) and column.flatten().null_count):
            raise ShardFault(f"column {name!r} has missing values")


def _check_lengths(columns: Mapping[str, pa.Array]) -> None:
    length_B = columns["length"].to_numpy()
    for name in ("response_tokens", "behaviour_logps", "ref_logps"):
        column = columns[name]
        if not _is_optional(name, column) and not np.array_equal(column.value_lengths().to_numpy(), length_B):
            raise ShardFault(f"the lengths of {name!r} do not match column 'length'")
    mask = columns["loss_mask"]
    has_mask_B = mask.is_valid().to_numpy(zero_copy_only=False)
    if not np.array_equal(mask.drop_null().value_lengths().to_numpy(), length_B[has_mask_B]):
        raise ShardFault("the lengths of 'loss_mask' do not match column 'length'")
    _check_steps(columns["step_ends"], columns["step_values"], length_B)
    if not columns["prompt_tokens"].value_lengths().to_numpy().all():
        raise ShardFault("a prompt has no tokens")


def _check_steps(ends: pa.Array, values: pa.Array, length_B: np.ndarray) -> None:
    stored = ends.is_valid()
    if not (stored.equals(values.is_valid()) and ends.value_lengths().equals(values.value_lengths())):
        raise ShardFault("the lengths of 'step_values' do not match column 'step_ends'")
    length_M = length_B[stored.to_numpy(zero_copy_only=False)]
    ends_N, steps_M = ends.flatten().to_numpy(), ends.drop_null().value_lengths().to_numpy()
    last_M = np.cumsum(steps_M) - 1
    if not steps_M.all() or not np.array_equal(ends_N[last_M], length_M):
        raise ShardFault("the steps of 'step_ends' do not end with the response")
    sizes_N = np.diff(ends_N, prepend=0)
    sizes_N[last_M[:-1] + 1] = ends_N[last_M[:-1] + 1]
    if (sizes_N < 1).any():
        raise ShardFault("column 'step_ends' has a step without tokens")


def _check_numbers(columns: Mapping[str, pa.Array]) -> None:
    for name, column in columns.items():
        values = _floats(column)
        if values is not None and not np.isfinite(values).all():
            raise ShardFault(f"column {name!r} has a number that is not finite")
    if np.abs(columns["reward"].to_numpy()).max() > LARGEST_REWARD:
        raise ShardFault(f"a reward has an absolute value above {LARGEST_REWARD:g}")
    microseconds_B = columns["created_at"].cast(pa.int64()).to_numpy()
    if ((microseconds_B < _CALENDAR[0]) | (microseconds_B > _CALENDAR[1])).any():
        raise ShardFault("column 'created_at' has a time beyond all calendars")
    for name in _NUMBERED:
        if (columns[name].to_numpy() < 0).any():
            raise ShardFault(f"column {name!r} has a number below 0")
    for name in ("prompt_tokens", "response_tokens"):
        if (columns[name].flatten().to_numpy() < 0).any():
            raise ShardFault(f"column {name!r} has a negative token")


def _floats(column: pa.Array) -> np.ndarray | None:
    """Return the floating-point numbers in a column, also those in lists and maps; None if the column has none."""
    if pa.types.is_map(column.type):
        column = column.items
    elif pa.types.is_list(column.type):
        column = column.flatten()
    return column.to_numpy(zero_copy_only=False) if pa.types.is_floating(column.type) else None
