"""A run as tables: `connect(run)` gives an in-memory DuckDB connection whose queries can read the run and nothing else.

The connection shows what was stored when it was made; connect again to see more. Small records become tables, Parquet
objects are read when a query asks for them, through handles that the connection holds. So no query needs the file
system, and DuckDB is told to refuse it altogether: files can be neither read nor written, whatever the SQL says.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow import fs

from storage import layout, mirror
from storage.attempts import Span, chain
from storage.ledger import DRAWS_SCHEMA
from storage.mirror import Progress, Snapshot
from storage.prompts import PROMPTS_SCHEMA
from storage.run import Run, resolve
from storage.schema import TRAJECTORY_SCHEMA
from tba.types import Version

VIEWS_SQL = files("storage").joinpath("sql/views.sql").read_text()

METRICS = (
    "loss", "grad_norm", "lr", "beta", "log_z", "residual_abs", "log_ratio_mean", "reward_mean", "age_mean", "age_max",
    "recent_share", "tokens", "seconds_step", "seconds_wait", "seconds_forward_backward", "seconds_draw",
    "seconds_fetch", "seconds_sync", "seconds_collate",
)  # fmt: skip
"""Metrics that `steps` always has; others show once a run has measured them."""

_TIME = pa.timestamp("us")
SHARDS = pa.schema(
    {
        "key": pa.string(), "searcher": pa.int32(), "seq": pa.int32(), "state": pa.string(), "rows": pa.int64(),
        "bytes": pa.int64(), "sha256": pa.string(), "sync": pa.int32(), "step": pa.int32(), "reason": pa.string(),
    }
)  # fmt: skip
SYNCS = pa.schema(
    {
        "sync": pa.int32(), "step": pa.int32(), "attempt": pa.int32(), "shards": pa.int32(), "rows": pa.int64(),
        "refused": pa.int32(), "previous_sha256": pa.string(), "created_at": _TIME,
    }
)  # fmt: skip
STEPS = pa.schema(
    {
        "step": pa.int32(), "sync": pa.int32(), "attempt": pa.int32(), "version": pa.int32(),
        "version_attempt": pa.int32(), **dict.fromkeys(METRICS, pa.float64()), "weights_sha256": pa.string(),
        "created_at": _TIME, "abandoned": pa.bool_(),
    }
)  # fmt: skip
VERSIONS = pa.schema(
    {
        "version": pa.int32(), "attempt": pa.int32(), "step": pa.int32(), "state": pa.string(),
        "abandoned": pa.bool_(), "files": pa.int32(), "bytes": pa.int64(), "sha256": pa.string(), "created_at": _TIME,
    }
)  # fmt: skip
CHECKPOINTS = pa.schema(
    {
        "sync": pa.int32(), "attempt": pa.int32(), "step": pa.int32(), "abandoned": pa.bool_(), "files": pa.int32(),
        "bytes": pa.int64(), "created_at": _TIME,
    }
)  # fmt: skip
EVALUATIONS = pa.schema(
    {
        "version": pa.int32(), "attempt": pa.int32(), "step": pa.int32(), "metric": pa.string(),
        "value": pa.float64(), "n": pa.int64(), "seconds": pa.float64(), "abandoned": pa.bool_(), "created_at": _TIME,
    }
)  # fmt: skip
EVENTS = pa.schema(
    {
        "created_at": _TIME, "role": pa.string(), "life": pa.int32(), "seq": pa.int32(), "kind": pa.string(),
        "severity": pa.string(), "message": pa.string(), "data": pa.string(),
    }
)  # fmt: skip
ATTEMPTS = pa.schema(
    {
        "attempt": pa.int32(), "continues_sync": pa.int32(), "continues_attempt": pa.int32(), "created_at": _TIME,
    }
)  # fmt: skip

_PARQUET = ds.ParquetFileFormat(
    default_fragment_scan_options=ds.ParquetFragmentScanOptions(page_checksum_verification=True)
)
_LOCKED = (
    "set enable_external_access = false",
    "set autoload_known_extensions = false",
    "set autoinstall_known_extensions = false",
    "set allow_community_extensions = false",
    "set python_enable_replacements = false",
    "set lock_configuration = true",
)


def connect(run: str | Run, *, progress: Progress | None = None) -> duckdb.DuckDBPyConnection:
    """The views of a run, given as a name under the default root, a path or a URL. Of a remote run what is new is
    copied to this machine first, and `progress` told about it."""
    run = run if isinstance(run, Run) else Run.open(resolve(run))
    return connect_snapshot(mirror.take(run, progress=progress))


def connect_snapshot(snapshot: Snapshot) -> duckdb.DuckDBPyConnection:
    spans = chain(snapshot.run)
    admitted = _admitted(snapshot)
    steps_of = _steps_of_versions(snapshot)
    con = duckdb.connect(":memory:", config={"temp_directory": ""})  # nothing is spilled to the working directory
    con.execute("set TimeZone = 'UTC'")
    con.execute("create schema stored")
    con.execute("use stored")
    shards = _shards(snapshot, admitted)
    tables = {
        "shards": pa.Table.from_pylist(shards, SHARDS),
        "syncs": _syncs(snapshot),
        "steps": _steps(snapshot, spans),
        "versions": _versions(snapshot, spans, steps_of),
        "checkpoints": _checkpoints(snapshot, spans),
        "evaluations": _evaluations(snapshot, spans),
        "events": _events(snapshot),
        "attempts": _attempts(snapshot),
        "version_steps": pa.table(
            {"version": pa.array(steps_of.keys(), pa.int32()), "step": pa.array(steps_of.values(), pa.int32())}
        ),
    }
    for name, table in tables.items():
        con.from_arrow(table).create(name)
    con.from_arrow(_trajectories(snapshot, shards)).create_view("trajectories")
    con.from_arrow(_draws(snapshot, spans)).create_view("draws")
    con.from_arrow(_prompts(snapshot)).create_view("prompts")
    con.execute("use main")
    con.execute(VIEWS_SQL)
    for setting in _LOCKED:
        con.execute(setting)
    return con


# --- shards and what they hold --------------------------------------------------------------------------------------


class _Entry(NamedTuple):
    """What a sync record says of a shard."""

    sync: int
    step: int
    shard: Mapping[str, Any]


def _admitted(snapshot: Snapshot) -> dict[str, _Entry]:
    return {
        shard["key"]: _Entry(record["sync"], record["step"], shard)
        for _, record in snapshot.read_all(layout.SYNCS)
        for shard in record["shards"]
    }


def _refused(snapshot: Snapshot) -> dict[str, str]:
    return {
        refused["key"]: refused["reason"]
        for _, record in snapshot.read_all(layout.SYNCS)
        for refused in record["refused"]
    }


def _shards(snapshot: Snapshot, admitted: Mapping[str, _Entry]) -> list[dict[str, Any]]:
    """Every shard there is or should be. One that no record speaks of is `waiting`, if it can be read at all."""
    refused = _refused(snapshot)
    rows = []
    for key in sorted({*snapshot.keys(layout.TRAJECTORIES), *admitted, *refused}):
        name = layout.parse_shard(key)
        if name is None:
            continue
        row: dict[str, Any] = {"key": key, "searcher": name[0], "seq": name[1]}
        if key in admitted:
            entry = admitted[key]
            state = "admitted" if key in snapshot.files else "missing"
            facts = {field: entry.shard[field] for field in ("rows", "bytes", "sha256")}
            rows.append({**row, **facts, "state": state, "sync": entry.sync, "step": entry.step})
        elif key in refused:
            rows.append({**row, "state": "refused", "reason": refused[key]})
        else:
            rows.append({**row, **_waiting(snapshot, key)})
    return rows


def _waiting(snapshot: Snapshot, key: str) -> dict[str, Any]:
    """A shard that the next record will admit or refuse; queries leave out what they could not read."""
    path = snapshot.files[key]
    try:
        footer = pq.read_metadata(path)
        readable = set(TRAJECTORY_SCHEMA.names) <= set(footer.schema.to_arrow_schema().names)
    except (pa.ArrowException, OSError) as error:
        return {"state": "unreadable", "reason": str(error)}
    if not readable:
        return {"state": "unreadable", "reason": "has another schema"}
    return {"state": "waiting", "rows": footer.num_rows, "bytes": path.stat().st_size}


def _trajectories(snapshot: Snapshot, shards: Sequence[Mapping[str, Any]]) -> ds.Dataset:
    """The rows of readable shards. What a record says of a shard is known to its rows without reading them, so a query
    that asks for some syncs opens only their shards."""
    readable = [shard for shard in shards if shard["state"] in ("admitted", "waiting")]
    columns = ("seq", "sync", "step")
    return _dataset(
        snapshot,
        {shard["key"]: {name: shard.get(name) for name in columns} for shard in readable},
        _with_extras(snapshot, readable),
        dict.fromkeys(columns, pa.int32()),
    )


def _with_extras(snapshot: Snapshot, shards: Sequence[Mapping[str, Any]]) -> pa.Schema:
    """The schema of trajectories, and the columns that a task has added, as its oldest and newest shards show them."""
    samples = {shard["searcher"]: shard["key"] for shard in reversed(shards)}
    newest = {shard["searcher"]: shard["key"] for shard in shards}
    schema = TRAJECTORY_SCHEMA
    for key in {*samples.values(), *newest.values()}:
        try:
            found = pq.read_schema(snapshot.files[key])
        except (pa.ArrowException, OSError):  # damaged since it was admitted: queries that reach it will say so
            continue
        for field in found:
            if field.name not in schema.names:
                schema = schema.append(field)
    return schema


def _dataset(
    snapshot: Snapshot, facts: Mapping[str, Mapping[str, Any]], schema: pa.Schema, columns: Mapping[str, pa.DataType]
) -> ds.Dataset:
    """Parquet objects as one relation, with `facts` about each as additional columns."""
    schema = pa.schema([*_naive(schema), *(pa.field(name, kind) for name, kind in columns.items())])
    if not facts:
        return ds.dataset(schema.empty_table())
    return ds.FileSystemDataset.from_paths(
        [str(snapshot.files[key]) for key in facts],
        schema=schema,
        format=_PARQUET,
        filesystem=fs.LocalFileSystem(),
        partitions=[_guarantee(known) for known in facts.values()],
    )


def _guarantee(known: Mapping[str, Any]) -> ds.Expression:
    terms = [pc.field(name).is_null() if value is None else pc.field(name) == value for name, value in known.items()]
    expression = terms[0]
    for term in terms[1:]:
        expression = expression & term
    return expression


def _naive(schema: pa.Schema) -> list[pa.Field]:
    """Times without a zone: all are UTC, and so is every arithmetic on them."""
    return [field.with_type(_TIME) if pa.types.is_timestamp(field.type) else field for field in schema]


def _prompts(snapshot: Snapshot) -> ds.Dataset:
    keys = [key for key in snapshot.keys(layout.PROMPTS) if key.endswith(".parquet")]
    facts = {key: {"split": key.removeprefix(layout.PROMPTS).removesuffix(".parquet")} for key in keys}
    return _dataset(snapshot, facts, PROMPTS_SCHEMA, {"split": pa.string()})


# --- the ledger -----------------------------------------------------------------------------------------------------


def counts(spans: Iterable[Span], name: Version) -> bool:
    """Whether the ledger that an attempt wrote at a sync belongs to the run as it stands."""
    return any(span.attempt == name.attempt and span.covers(name.number) for span in spans)


def stands(spans: Iterable[Span], version: Version) -> bool:
    """Likewise of a version or checkpoint: an attempt also publishes the version it starts from."""
    return counts(spans, version) or any(
        span.attempt == version.attempt and span.first_sync == version.number + 1 for span in spans
    )


def ledger_name(key: str) -> Version:
    """Sync and attempt of an object of the ledger."""
    return Version.parse(key.rpartition("/")[2].removesuffix(".parquet"))


def _draws(snapshot: Snapshot, spans: Sequence[Span]) -> ds.Dataset:
    facts = {}
    for key in snapshot.keys(layout.DRAWS):
        name = ledger_name(key)
        facts[key] = {"sync": name.number, "attempt": name.attempt, "abandoned": not counts(spans, name)}
    columns = {"sync": pa.int32(), "attempt": pa.int32(), "abandoned": pa.bool_()}
    return _dataset(snapshot, facts, DRAWS_SCHEMA, columns)


def _steps(snapshot: Snapshot, spans: Sequence[Span]) -> pa.Table:
    tables = [STEPS.empty_table()]
    for key in snapshot.keys(layout.STEPS):
        table = pq.read_table(snapshot.files[key])
        table = table.cast(pa.schema(_naive(table.schema)))
        abandoned = pa.array([not counts(spans, ledger_name(key))] * len(table))
        tables.append(table.append_column("abandoned", abandoned))
    return pa.concat_tables(tables, promote_options="permissive").sort_by(
        [("attempt", "ascending"), ("step", "ascending")]
    )


# --- records --------------------------------------------------------------------------------------------------------


def _syncs(snapshot: Snapshot) -> pa.Table:
    rows = [
        {
            **{field: record[field] for field in ("sync", "step", "attempt", "rows", "previous_sha256")},
            "shards": len(record["shards"]),
            "refused": len(record["refused"]),
            "created_at": _time(record["created_at"]),
        }
        for _, record in snapshot.read_all(layout.SYNCS)
    ]
    return pa.Table.from_pylist(rows, SYNCS)


def _manifests(snapshot: Snapshot, prefix: str) -> list[tuple[Version, dict[str, Any]]]:
    return [(Version.parse(key.split("/")[1]), manifest) for key, manifest in snapshot.read_all(prefix)]


def _contents(manifest: Mapping[str, Any]) -> dict[str, Any]:
    listed = manifest["files"]
    return {
        "files": len(listed),
        "bytes": sum(file["bytes"] for file in listed),
        "created_at": _time(manifest["created_at"]),
    }


def _versions(snapshot: Snapshot, spans: Sequence[Span], steps_of: Mapping[int, int]) -> pa.Table:
    """Those that are kept, and those that a retention record has given up."""
    kept = dict(_manifests(snapshot, layout.VERSIONS))
    removed = {
        Version.parse(name)
        for _, record in snapshot.read_all(layout.RETENTION)
        for name in record["removed"]["versions"]
    }
    rows = [
        {
            "version": version.number,
            "attempt": version.attempt,
            "step": kept[version]["step"] if version in kept else steps_of.get(version.number),
            "state": "removed" if version in removed else "kept",
            "abandoned": not stands(spans, version),
            **({**_contents(kept[version]), "sha256": kept[version].get("sha256")} if version in kept else {}),
        }
        for version in sorted({*kept, *removed}, key=lambda version: version.order)
    ]
    return pa.Table.from_pylist(rows, VERSIONS)


def _checkpoints(snapshot: Snapshot, spans: Sequence[Span]) -> pa.Table:
    rows = [
        {
            "sync": name.number,
            "attempt": name.attempt,
            "step": manifest["step"],
            "abandoned": not stands(spans, name),
            **_contents(manifest),
        }
        for name, manifest in _manifests(snapshot, layout.CHECKPOINTS)
    ]
    return pa.Table.from_pylist(rows, CHECKPOINTS)


def _evaluations(snapshot: Snapshot, spans: Sequence[Span]) -> pa.Table:
    rows = [
        {
            **{field: record[field] for field in ("version", "attempt", "step")},
            **{field: score[field] for field in ("metric", "value", "n", "seconds")},
            "abandoned": not stands(spans, Version(record["version"], record["attempt"])),
            "created_at": _time(record["created_at"]),
        }
        for _, record in snapshot.read_all(layout.EVALUATIONS)
        for score in record["scores"]
    ]
    return pa.Table.from_pylist(rows, EVALUATIONS)


def _events(snapshot: Snapshot) -> pa.Table:
    rows = [
        {**record, "created_at": _time(record["at"]), "data": json.dumps(record.get("data", {}))}
        for _, record in snapshot.read_all(layout.EVENTS)
    ]
    return pa.Table.from_pylist(sorted(rows, key=lambda row: row["created_at"]), EVENTS)


def _attempts(snapshot: Snapshot) -> pa.Table:
    rows = []
    for _, record in snapshot.read_all(layout.ATTEMPTS):
        continues = record["continues"] or {}
        rows.append(
            {
                "attempt": record["attempt"],
                "continues_sync": continues.get("sync"),
                "continues_attempt": continues.get("attempt"),
                "created_at": _time(record["created_at"]),
            }
        )
    return pa.Table.from_pylist(rows, ATTEMPTS)


def _steps_of_versions(snapshot: Snapshot) -> dict[int, int]:
    """The step that each version number follows: by the run's arithmetic, by sync records, and by manifests."""
    config = snapshot.run.config
    every, last = config.get("sync", {}).get("every"), config.get("training", {}).get("steps")
    planned = {n: min(n * every, last) for n in range(-(-last // every) + 1)} if every and last else {}
    recorded = {record["sync"]: record["step"] for _, record in snapshot.read_all(layout.SYNCS)}
    published = {version.number: manifest["step"] for version, manifest in _manifests(snapshot, layout.VERSIONS)}
    return {**planned, **recorded, **published}


def _time(text: str) -> datetime:
    """A record's time, in UTC and without a zone."""
    return datetime.fromisoformat(text).astimezone(UTC).replace(tzinfo=None)
