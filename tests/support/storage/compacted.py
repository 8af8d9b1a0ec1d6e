"""Synthetic runs that are compacted, and what such runs hold."""

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

import storage
from storage import layout
from storage.buffer.replay_buffer import DuckReplayBuffer
from storage.log.schema import COLUMNS
from storage.log.shard_reader import ShardReader
from storage.log.sync_records import read_chain
from storage.maintenance.compactor import Compacted, compact
from storage.runs.run import Run
from tba.types import Version
from tests.support.builders import rows_of
from tests.support.faults.rewriting import with_digest
from tests.support.storage.indexes import make_eligibility
from tests.support.storage.synthetic import LAST_SYNC, SyntheticRun, make_config

VIEWS = ("trajectories", "groups", "shards", "syncs", "steps", "draws", "versions", "checkpoints", "attempts")
"""The views that `tables` reads."""
CAPACITY = 2
"""A capacity so small that a compaction gives up payloads."""


def compacted(run: Run, *, keep: int = 1, drop_beyond: int | None = None, **rule: Any) -> Compacted:
    return compact(
        run, keep_checkpoints=keep, drop_beyond=None if drop_beyond is None else make_eligibility(drop_beyond, **rule)
    )


def replayed(run: Run, upto: int = LAST_SYNC, *, capacity: int | None = None, **rule: str) -> DuckReplayBuffer:
    """Return the buffer of a new trainer, with the records of the run replayed."""
    config = make_config().replace({f"sampling.{name}": value for name, value in rule.items()})
    config = config if capacity is None else config.replace({"sampling.capacity": capacity})
    made = SyntheticRun.of(run)
    made.config = config
    buffer = made.buffer(9)
    buffer.replay(upto)
    return buffer


def save_checkpoint(run: Run, sync: int, *, step: int) -> None:
    """Store what a trainer stores after a record, as far as compaction reads it."""
    made = SyntheticRun.of(run)
    made.publish(Version(sync, 2))
    prefix = layout.checkpoint(Version(sync, 2))
    source = layout.checkpoint(Version(LAST_SYNC, 2))
    for entry in run.store.list(source):
        data, name = run.store.read(entry.key), entry.key.removeprefix(source)
        manifest = name == layout.MANIFEST
        changed = with_digest({**json.loads(data), "sync": sync, "step": step}) if manifest else data
        run.store.create(prefix + name, changed)


def tables(run: Run, *, without: Sequence[str] = ()) -> dict[str, list[tuple]]:
    """Return the rows of every view, sorted."""
    found = {}
    with storage.connect(run) as con:
        for view in VIEWS:
            names = [name for name, *_ in con.execute(f"describe {view}").fetchall() if name not in without]
            found[view] = sorted(con.execute(f"select {', '.join(names)} from {view}").fetchall(), key=repr)
    return found


def loose(run: Run) -> list[str]:
    return [entry.key for entry in run.own.list(layout.TRAJECTORIES)]


def objects(run: Run) -> list[str]:
    return [entry.key for entry in run.own.list(layout.COMPACTIONS) if entry.key.endswith(".parquet")]


def drawn(buffer: DuckReplayBuffer, steps: range) -> list[tuple]:
    return [(draws := buffer.draw(step), rows_of(buffer.fetch(draws))) for step in steps]


def light(run: Run) -> list[pa.Table]:
    shards = [shard for record in read_chain(run) for shard in record.shards]
    return [table for _, table in ShardReader(run, disk_bytes=0).light(shards, COLUMNS)]
