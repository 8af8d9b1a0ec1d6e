"""Synthetic runs that are compacted."""

import json

from storage import layout
from storage.buffer.replay_buffer import DuckReplayBuffer
from storage.runs.run import Run
from tba.types import Version
from tests.support.faults.rewriting import with_digest
from tests.support.storage.synthetic import LAST_SYNC, SyntheticRun, make_config


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
