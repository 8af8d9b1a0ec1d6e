"""Makes tables from the small records of a run, such as one row per shard, sync, gradient step, version, event and
attempt."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from storage import layout
from storage.log.sync_records import Recording, SyncRecord
from storage.objects import parquet, records
from storage.objects.damage import DamageLog
from storage.objects.manifest_folders import stored_files
from storage.queries.mirror import Snapshot
from storage.runs import arithmetic
from storage.runs.attempts import Span, accepts, stands
from storage.runs.retention import given_up
from storage.runs.run import Run
from tba.errors import Damaged
from tba.types import Version

Row = dict[str, Any]
Record = Mapping[str, Any]

METRICS = (
    "loss", "grad_norm", "lr", "beta", "log_z", "residual_abs", "log_ratio_mean", "reward_mean", "age_mean", "age_max",
    "recent_share", "equal_rewards", "tokens", "seconds_step", "seconds_wait", "seconds_forward_backward",
    "seconds_snapshot", "seconds_backlog", "seconds_draw", "seconds_fetch", "seconds_sync", "seconds_collate",
    "skipped", "clipped",
)  # fmt: skip
"""The metrics that the table `steps` always has. Other metrics get a column once a run has measured them."""

TIME = pa.timestamp("us")
SHARDS = pa.schema(
    {
        "key": pa.string(), "searcher": pa.int32(), "seq": pa.int32(), "state": pa.string(), "rows": pa.int64(),
        "bytes": pa.int64(), "sha256": pa.string(), "sync": pa.int32(), "step": pa.int32(), "reason": pa.string(),
    }
)  # fmt: skip
SYNCS = pa.schema(
    {
        "sync": pa.int32(), "step": pa.int32(), "attempt": pa.int32(), "shards": pa.int32(), "rows": pa.int64(),
        "refused": pa.int32(), "previous_sha256": pa.string(), "created_at": TIME,
    }
)  # fmt: skip
STEPS = pa.schema(
    {
        "step": pa.int32(), "sync": pa.int32(), "attempt": pa.int32(), "version": pa.int32(),
        "version_attempt": pa.int32(), **dict.fromkeys(METRICS, pa.float64()), "weights_sha256": pa.string(),
        "created_at": TIME, "abandoned": pa.bool_(),
    }
)  # fmt: skip
VERSIONS = pa.schema(
    {
        "version": pa.int32(), "attempt": pa.int32(), "step": pa.int32(), "state": pa.string(),
        "abandoned": pa.bool_(), "files": pa.int32(), "bytes": pa.int64(), "sha256": pa.string(),
        "changed_share": pa.float64(), "base": pa.int32(), "stored_bytes": pa.int64(), "created_at": TIME,
    }
)  # fmt: skip
CHECKPOINTS = pa.schema(
    {
        "sync": pa.int32(), "attempt": pa.int32(), "step": pa.int32(), "abandoned": pa.bool_(), "files": pa.int32(),
        "bytes": pa.int64(), "created_at": TIME,
    }
)  # fmt: skip
EVENTS = pa.schema(
    {
        "created_at": TIME, "role": pa.string(), "life": pa.int32(), "seq": pa.int32(), "kind": pa.string(),
        "severity": pa.string(), "message": pa.string(), "data": pa.string(),
    }
)  # fmt: skip
SETTINGS = pa.schema({"name": pa.string(), "value": pa.string()})
ARITHMETIC = pa.schema(
    {"compute_dtype": pa.string(), "device": pa.string(), "threads": pa.int32(), "torch": pa.string()}
)
ATTEMPTS = pa.schema(
    [
        pa.field("attempt", pa.int32()), pa.field("continues_sync", pa.int32()),
        pa.field("continues_attempt", pa.int32()), pa.field("created_at", TIME), *ARITHMETIC,
    ]
)  # fmt: skip
VERSION_STEPS = pa.schema({"version": pa.int32(), "attempt": pa.int32(), "step": pa.int32()})

_KEYS = {field.name: field.type for field in STEPS if field.name not in (*METRICS, "abandoned")}
"""The columns that every stored object of steps has, in addition to metrics."""


# --- records as rows ------------------------------------------------------------------------------------------------
# Each function returns the values of a record that its view needs. A missing field raises KeyError; `records.reading`
# converts this into an error that names the record.


def sync_row(record: SyncRecord) -> Row:
    return {
        **{name: getattr(record, name) for name in ("sync", "step", "attempt", "rows", "previous_sha256")},
        "shards": len(record.shards),
        "refused": len(record.refused),
        "created_at": time_of(record.created_at),
    }


def version_row(version: Version, manifest: Record) -> Row:
    named = {"version": version.number, "attempt": version.attempt}
    own = {"sha256": manifest["sha256"], "changed_share": manifest.get("changed_share")}
    difference = manifest.get("difference")
    stored = {
        "base": Version.parse(difference["base"]).number if difference else None,
        "stored_bytes": sum(file["bytes"] for file in stored_files(manifest)),
    }
    return {**named, **_contents(manifest), **own, **stored}


def checkpoint_row(name: Version, manifest: Record) -> Row:
    return {"sync": name.number, "attempt": name.attempt, **_contents(manifest)}


def _contents(manifest: Record) -> Row:
    listed = manifest["files"]
    return {
        "step": manifest["step"],
        "files": len(listed),
        "bytes": sum(file["bytes"] for file in listed),
        "created_at": time_of(manifest["created_at"]),
    }


def event_row(record: Record) -> Row:
    return {
        **{field: record[field] for field in ("role", "life", "seq", "kind", "severity", "message")},
        "created_at": time_of(record["at"]),
        "data": json.dumps(record.get("data", {})),
    }


def attempt_row(record: Record) -> Row:
    continues = record["continues"] or {"sync": None, "attempt": None}
    return {
        "attempt": record["attempt"],
        "continues_sync": continues["sync"],
        "continues_attempt": continues["attempt"],
        "created_at": time_of(record["created_at"]),
    }


def fitting(rows: Iterable[Row], schema: pa.Schema) -> list[Row]:
    """Return the rows as a list. Raise an error of pyarrow if a value does not fit the type of its column in
    `schema`."""
    rows = list(rows)
    pa.Table.from_pylist(rows, schema)
    return rows


def arithmetic_row(key: str, data: bytes) -> Row:
    """Return the columns of an attempt that say how it computed. Raise Damaged if they do not fit `ARITHMETIC`."""
    return fitting([asdict(arithmetic.decode(data, key, layout.parse_arithmetic(key) or 0))], ARITHMETIC)[0]


def rows_of(
    snapshot: Snapshot,
    prefix: str,
    schema: pa.Schema,
    damage: DamageLog,
    decode: Callable[[str, Record], Iterable[Row]],
) -> list[Row]:
    """Return the rows that `decode` makes of each record under a prefix. If a record cannot be decoded, or its rows do
    not fit `schema`, add the record to `damage` and leave it out."""
    found: list[Row] = []
    for key, data in snapshot.read_all(prefix, damage):
        with damage.looking_at(key):
            found += fitting(decode(key, records.decode(data, key)), schema)
    return found


def named(key: str, own: str, rows: Iterable[Row]) -> Iterable[Row]:
    """Return the rows of a record. Raise Damaged if its key is not `own`, the key that follows from its content."""
    if key != own:
        raise Damaged(f"{key} has the content of {own}")
    return rows


def time_of(text: str) -> datetime:
    """Return the time in a record as a datetime in UTC without a time zone."""
    return datetime.fromisoformat(text).astimezone(UTC).replace(tzinfo=None)


def syncs(synced: Sequence[SyncRecord]) -> pa.Table:
    return pa.Table.from_pylist([sync_row(record) for record in synced], SYNCS)


# --- the ledger -----------------------------------------------------------------------------------------------------


def steps(snapshot: Snapshot, spans: Sequence[Span], damage: DamageLog) -> pa.Table:
    found = [STEPS.empty_table()]
    for key, data in snapshot.read_all(layout.STEPS, damage):
        if (name := layout.parse_ledger(key)) and key not in damage:
            with damage.looking_at(key):
                table = decode_steps(data, key)
                for column, own in (("sync", name.number), ("attempt", name.attempt)):
                    if {*table[column].to_pylist()} - {own}:
                        raise Damaged(f"{key} has rows of another {column} than its name says")
                abandoned = pa.array([not accepts(spans, name)] * len(table), pa.bool_())
                found.append(table.append_column("abandoned", abandoned))
    return pa.concat_tables(found, promote_options="default").sort_by([("attempt", "ascending"), ("step", "ascending")])


def decode_steps(data: bytes, name: str) -> pa.Table:
    """Return the steps in an object of the ledger, with all metrics that they measured. Raise Damaged if the object
    holds something else. Unknown columns that are not numeric are left out, because a later version may have added
    them."""
    table = parquet.decode(data, name)
    names = table.column_names
    if not _KEYS.keys() <= set(names) or len({*map(str.lower, names), "abandoned"}) != len(names) + 1:
        raise Damaged(f"{name} has other columns than steps have: {', '.join(names)}")
    known = [field.name for field in table.schema if field.name in (*_KEYS, *METRICS) or _is_number(field.type)]
    with records.reading(name):
        return table.select(known).cast(pa.schema([(column, _KEYS.get(column, pa.float64())) for column in known]))


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_floating(kind) or pa.types.is_integer(kind)


# --- small records --------------------------------------------------------------------------------------------------


def published(snapshot: Snapshot, damage: DamageLog) -> dict[Version, Row]:
    """Return the row of each version that has a readable manifest."""
    rows = rows_of(snapshot, layout.VERSIONS, VERSIONS, damage, _version)
    return {Version(row["version"], row["attempt"]): row for row in rows}


def _version(key: str, manifest: Record) -> Iterable[Row]:
    name = _folder(key)
    own = Version(*records.integers(manifest, "version", "attempt"))
    return named(key, layout.version(own) + layout.MANIFEST, [version_row(name, manifest)])


def _checkpoint(key: str, manifest: Record) -> Iterable[Row]:
    name = _folder(key)
    own = Version(*records.integers(manifest, "sync", "attempt"))
    return named(key, layout.checkpoint(own) + layout.MANIFEST, [checkpoint_row(name, manifest)])


def versions(
    snapshot: Snapshot,
    spans: Sequence[Span],
    kept: Mapping[Version, Row],
    steps_of: Mapping[Version, int],
    damage: DamageLog,
) -> pa.Table:
    """Return a table of the versions that are kept and of those that a retention record has given up."""
    removed = given_up(snapshot.run, damage.looking_at).versions
    rows = [
        {
            "version": version.number,
            "attempt": version.attempt,
            "step": steps_of.get(version),
            **kept.get(version, {}),
            "state": "removed" if version in removed else "kept",
            "abandoned": not stands(spans, version),
        }
        for version in sorted({*kept, *removed}, key=lambda version: version.order)
    ]
    return pa.Table.from_pylist(rows, VERSIONS)


def _folder(key: str) -> Version:
    folder = layout.parse_folder(key)
    if folder is None:
        raise ValueError("it is in no folder of a version or checkpoint")
    return folder[0]


def steps_of_versions(
    snapshot: Snapshot, synced: Sequence[SyncRecord], kept: Mapping[Version, Row], damage: DamageLog
) -> dict[Version, int]:
    """Return, for each version, the gradient step whose weights it has. Versions that were never published are
    included. The steps come from sync records and manifests. In a replay, the steps of the parent's versions come from
    the parent's sync records."""
    numbers = (layout.parse_attempt(key) or 0 for key in snapshot.keys(layout.ATTEMPTS))
    newest = max([1, *numbers, *(version.attempt for version in kept)])
    recorded = {0: 0, **{record.sync: record.step for record in synced}}
    steps = {Version(sync, attempt): step for attempt in range(1, newest + 1) for sync, step in recorded.items()}
    inherits = snapshot.run.inherits
    replayed = Recording(inherits, damage.looking_at).steps() if inherits and inherits.replays else {}
    return {**steps, **{version: row["step"] for version, row in kept.items()}, **replayed}


def version_steps(steps_of: Mapping[Version, int]) -> pa.Table:
    rows = [{"version": it.number, "attempt": it.attempt, "step": step} for it, step in steps_of.items()]
    return pa.Table.from_pylist(rows, VERSION_STEPS)


def checkpoints(snapshot: Snapshot, spans: Sequence[Span], damage: DamageLog) -> pa.Table:
    rows = rows_of(snapshot, layout.CHECKPOINTS, CHECKPOINTS, damage, _checkpoint)
    for row in rows:
        row["abandoned"] = not stands(spans, Version(row["sync"], row["attempt"]))
    return pa.Table.from_pylist(rows, CHECKPOINTS)


def events(snapshot: Snapshot, damage: DamageLog) -> pa.Table:
    rows = rows_of(snapshot, layout.EVENTS, EVENTS, damage, _event)
    return pa.Table.from_pylist(sorted(rows, key=lambda row: row["created_at"]), EVENTS)


def _event(key: str, record: Record) -> Iterable[Row]:
    row = event_row(record)
    return named(key, layout.event(row["role"], row["life"], row["seq"]), [row])


def attempts(snapshot: Snapshot, damage: DamageLog) -> pa.Table:
    computed: dict[int, Row] = {}
    for key, data in snapshot.read_all(layout.ARITHMETIC, damage):
        with damage.looking_at(key):
            computed[layout.parse_arithmetic(key) or 0] = arithmetic_row(key, data)
    rows = rows_of(snapshot, layout.ATTEMPTS, ATTEMPTS, damage, _attempt)
    for row in rows:
        row |= computed.get(row["attempt"], {})
    return pa.Table.from_pylist(rows, ATTEMPTS)


def _attempt(key: str, record: Record) -> Iterable[Row]:
    row = attempt_row(record)
    return named(key, layout.attempt(row["attempt"]), [row])


def settings(snapshot: Snapshot) -> pa.Table:
    """Return a table of the run's settings, with their dotted names and their values as JSON."""
    return pa.Table.from_pylist([{"name": name, "value": value} for name, value in by_name(snapshot.run)], SETTINGS)


def by_name(run: Run) -> Iterator[tuple[str, str]]:
    """Yield the dotted name of each setting of a run, and its value as JSON, as they are stored."""
    return flattened(run.config)


def flattened(config: Record, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted name of each setting in `config`, and its value as JSON."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", json.dumps(value)


def naive(schema: pa.Schema) -> pa.Schema:
    """Return the schema with times that have no time zone. All times are UTC, and so is all arithmetic on them."""
    fields = [field.with_type(TIME) if pa.types.is_timestamp(field.type) else field for field in schema]
    return pa.schema(fields)
