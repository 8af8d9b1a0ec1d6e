"""Finds out which objects of the ledger and of prompts can be read, and which are missing.

Each object is compared with the record that holds its digest. Older runs have no such records: their objects are read
once, and the result is remembered.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage import layout
from storage.local_files.remembered_reads import RememberedReads
from storage.log.ledger import DRAWS_SCHEMA, LATER, LedgerRecord
from storage.log.prompts import PROMPTS_SCHEMA
from storage.log.sync_records import SyncRecord
from storage.objects import parquet, records
from storage.objects.damage import IS_MISSING, DamageLog
from storage.objects.digests import Digest
from storage.queries.file_comparison import read_whole, verify
from storage.queries.mirror import Snapshot
from storage.runs.attempts import Span, accepts
from tba.errors import Damaged, first_line
from tba.types import Version


def ledger_names(snapshot: Snapshot) -> set[Version]:
    """Return the sync and the attempt of every object of the ledger."""
    keys = [*snapshot.keys(layout.STEPS), *snapshot.keys(layout.DRAWS)]
    return {name for key in keys if (name := layout.parse_ledger(key))}


def prompts(snapshot: Snapshot, damage: DamageLog, verified: RememberedReads) -> list[str]:
    """Return the keys of the objects of prompts that can be read. Add the others, and missing ones, to `damage`."""
    for prefix, split in ((layout.TRAJECTORIES, "train"), (layout.EVALUATIONS, "test")):
        key = layout.prompts(split)
        if snapshot.keys(prefix) and key not in snapshot.files:
            damage.add(key, f"{IS_MISSING}, but there are {prefix.rstrip('/')}")
    keys = [key for key in snapshot.keys(layout.PROMPTS) if layout.parse_prompts(key) is not None]
    good, keys = _described(snapshot, keys, _prompts_digests(snapshot, damage), damage, verified)
    told = read_whole(snapshot, keys, "prompts", partial(_table, schema=PROMPTS_SCHEMA), verified)
    return [*good, *_good(snapshot, keys, told, damage)]


def draws(
    snapshot: Snapshot,
    spans: Sequence[Span],
    recorded: Sequence[SyncRecord],
    damage: DamageLog,
    verified: RememberedReads,
) -> list[str]:
    """Return the keys of draws that can be read. Add draws and steps to `damage` if they are missing or do not match
    their ledger record. Also add draws of older runs that cannot be read, or that belong to steps of another sync."""
    _note_missing(snapshot, spans, damage)
    keys = [key for key in (*snapshot.keys(layout.STEPS), *snapshot.keys(layout.DRAWS)) if layout.parse_ledger(key)]
    good, undescribed = _described(snapshot, keys, _ledger_digests(snapshot, damage), damage, verified)
    good, keys = ([key for key in found if key.startswith(layout.DRAWS)] for found in (good, undescribed))
    told = read_whole(snapshot, keys, "draws", _draws, verified)
    step_of = {record.sync: record.step for record in recorded}
    for key in keys:
        sync = (layout.parse_ledger(key) or Version(0, 0)).number
        first, last = told.get(key, {}).get("steps") or (sync, -1)
        known = first <= last and sync in step_of and sync - 1 in step_of
        if known and not step_of[sync - 1] < first <= last <= step_of[sync]:
            damage.add(key, f"has draws of steps {first} to {last}, which its sync does not close")
    return [*good, *_good(snapshot, keys, told, damage)]


def _described(
    snapshot: Snapshot, keys: Sequence[str], said: Mapping[str, Digest], damage: DamageLog, verified: RememberedReads
) -> tuple[list[str], list[str]]:
    """Return the keys of objects that match their records, and the keys that no record describes. Add the others to
    `damage`."""
    good, damaged = verify(snapshot, said, verified)
    for it in damaged:
        damage.add(it.key, it.problem)
    return sorted(good), [key for key in keys if key not in said]


def _ledger_digests(snapshot: Snapshot, damage: DamageLog) -> dict[str, Digest]:
    found: dict[str, Digest] = {}
    for key, data in snapshot.read_all(layout.LEDGER, damage):
        with damage.looking_at(key):
            record = LedgerRecord.decode(data, key)
            name = Version(record.sync, record.attempt)
            if layout.ledger(*name) != key:
                raise Damaged(f"{key} says it is of {name}")
            found[layout.steps(*name)], found[layout.draws(*name)] = record.steps, record.draws
    return found


def _prompts_digests(snapshot: Snapshot, damage: DamageLog) -> dict[str, Digest]:
    found: dict[str, Digest] = {}
    for key, data in snapshot.read_all(layout.PROMPTS, damage, only=lambda it: layout.parse_prompts(it) is None):
        with damage.looking_at(key):
            said = records.decode(data, key, "split", "bytes", "sha256")
            found[layout.prompts(said["split"])] = Digest.decode(said)
    return found


def _note_missing(snapshot: Snapshot, spans: Sequence[Span], damage: DamageLog) -> None:
    """Add to `damage` the gaps of the ledger up to the newest sync that its steps, its records or a checkpoint have
    reached. Ledger records are listed before steps, so the listing of a live run may lack records of syncs that were
    written in between. Therefore a record counts as missing only if there is a later record or a checkpoint."""
    checkpoints = [folder[0] for key in snapshot.keys(layout.CHECKPOINTS) if (folder := layout.parse_folder(key))]
    reached, recorded = (
        _newest(spans, [*checkpoints, *filter(None, map(layout.parse_ledger, snapshot.keys(folder)))])
        for folder in (layout.STEPS, layout.LEDGER)
    )
    for sync in range(1, max(reached, recorded) + 1):
        for attempt in (span.attempt for span in spans if span.covers(sync)):
            wanted = [layout.steps(sync, attempt), layout.draws(sync, attempt)]
            if sync <= recorded and snapshot.run.owner_of(record := layout.ledger(sync, attempt)).digests:
                wanted.append(record)
            for key in wanted:
                if key not in snapshot.files:
                    damage.add(key, f"{IS_MISSING}, though the run has gone past its sync")


def _newest(spans: Sequence[Span], names: Iterable[Version]) -> int:
    return max((name.number for name in names if accepts(spans, name)), default=0)


def _good(
    snapshot: Snapshot, keys: Collection[str], told: Mapping[str, Mapping[str, Any]], damage: DamageLog
) -> list[str]:
    for key in keys:
        problem = told[key]["problem"] if key in told else _problem_of_footer(snapshot.files[key])
        if problem:
            damage.add(key, problem)
    return [key for key in keys if key not in damage]


def _draws(path: Path) -> dict[str, Any]:
    def steps(table: pa.Table) -> dict[str, Any]:
        steps = table["step"].drop_null().to_pylist()
        return {"steps": [min(steps), max(steps)] if steps else None}

    return _table(path, DRAWS_SCHEMA, later=LATER, about=steps)


def _table(
    path: Path,
    schema: pa.Schema,
    *,
    later: Collection[str] = (),
    about: Callable[[pa.Table], dict[str, Any]] = lambda table: {},
) -> dict[str, Any]:
    """Read a Parquet file. Return a dict with `problem`: what is wrong with the file, or an empty string. If nothing is
    wrong, the dict also has what `about` returns for the table."""
    try:
        return {**about(parquet.decode(path.read_bytes(), path.name, schema, later=later)), "problem": ""}
    except Damaged as error:
        return {"problem": str(error).removeprefix(path.name).strip()}


def _problem_of_footer(path: Path) -> str:
    try:
        pq.read_schema(path)
    except FileNotFoundError:
        return IS_MISSING
    except (pa.ArrowException, OSError, ValueError) as error:
        return first_line(error)
    return ""
