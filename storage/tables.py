"""The small records of a run as tables: one row per shard, sync, step, version, score, event and attempt."""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from storage import layout
from storage.attempts import Span
from storage.mirror import Snapshot
from storage.schema import TRAJECTORY_SCHEMA
from tba.types import Version

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

# --- shards ---------------------------------------------------------------------------------------------------------


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


def shards(snapshot: Snapshot) -> list[dict[str, Any]]:
    """Every shard there is or should be. One that no record speaks of is `waiting`, if it can be read at all."""
    admitted, refused = _admitted(snapshot), _refused(snapshot)
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


def steps(snapshot: Snapshot, spans: Sequence[Span]) -> pa.Table:
    tables = [STEPS.empty_table()]
    for key in snapshot.keys(layout.STEPS):
        table = pq.read_table(snapshot.files[key])
        table = table.cast(naive(table.schema))
        abandoned = pa.array([not counts(spans, ledger_name(key))] * len(table))
        tables.append(table.append_column("abandoned", abandoned))
    return pa.concat_tables(tables, promote_options="permissive").sort_by(
        [("attempt", "ascending"), ("step", "ascending")]
    )


# --- records --------------------------------------------------------------------------------------------------------


def syncs(snapshot: Snapshot) -> pa.Table:
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


def versions(snapshot: Snapshot, spans: Sequence[Span]) -> pa.Table:
    """Those that are kept, and those that a retention record has given up."""
    kept, steps_of = dict(_manifests(snapshot, layout.VERSIONS)), steps_of_versions(snapshot)
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


def checkpoints(snapshot: Snapshot, spans: Sequence[Span]) -> pa.Table:
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


def evaluations(snapshot: Snapshot, spans: Sequence[Span]) -> pa.Table:
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


def events(snapshot: Snapshot) -> pa.Table:
    rows = [
        {**record, "created_at": _time(record["at"]), "data": json.dumps(record.get("data", {}))}
        for _, record in snapshot.read_all(layout.EVENTS)
    ]
    return pa.Table.from_pylist(sorted(rows, key=lambda row: row["created_at"]), EVENTS)


def attempts(snapshot: Snapshot) -> pa.Table:
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


def steps_of_versions(snapshot: Snapshot) -> dict[int, int]:
    """The step that each version number follows: by the run's arithmetic, by sync records, and by manifests."""
    config = snapshot.run.config
    every, last = config.get("sync", {}).get("every"), config.get("training", {}).get("steps")
    planned = {n: min(n * every, last) for n in range(-(-last // every) + 1)} if every and last else {}
    recorded = {record["sync"]: record["step"] for _, record in snapshot.read_all(layout.SYNCS)}
    published = {version.number: manifest["step"] for version, manifest in _manifests(snapshot, layout.VERSIONS)}
    return {**planned, **recorded, **published}


def naive(schema: pa.Schema) -> pa.Schema:
    """Times without a zone: all are UTC, and so is every arithmetic on them."""
    fields = [field.with_type(_TIME) if pa.types.is_timestamp(field.type) else field for field in schema]
    return pa.schema(fields)


def _time(text: str) -> datetime:
    """A record's time, in UTC and without a zone."""
    return datetime.fromisoformat(text).astimezone(UTC).replace(tzinfo=None)
