"""Reads what sync records admit, and finds out whether each admitted shard is stored and unchanged.

A shard is an object of its own or lies in a compaction. Both kinds of objects are compared with the record that
describes them. A shard that is found to differ from its sync record is left out. Otherwise a query could join a draw to
a response that was not the one drawn.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage import layout
from storage.local_files.remembered_reads import RememberedReads
from storage.log.compactions import Compaction, Place, is_record, places
from storage.log.compactions import decode as decode_compaction
from storage.log.schema import LATER, SCHEMA_VERSION, TRAJECTORY_SCHEMA
from storage.log.sync_records import Shard, SyncRecord
from storage.log.sync_records import decode as decode_sync
from storage.objects import parquet
from storage.objects.damage import IS_MISSING, DamageLog
from storage.objects.digests import Digest
from storage.queries import tables
from storage.queries.file_comparison import read_whole, verify
from storage.queries.mirror import Snapshot
from storage.queries.tables import Row
from storage.runs.retention import given_up
from tba.errors import Damaged, first_line

Name = tuple[str, str]
"""The key and the sha256 of a shard."""


@dataclass(frozen=True)
class Admissions:
    records: list[SyncRecord]  # in order, without damaged ones
    shards: list[Row]  # rows of the view `shards`; the row of a compacted shard also has its `place`
    lacks_objects: bool  # True if sync records or admitted shards were not found anywhere
    has_moved: bool  # True if a listed object was gone when it was read, e.g. after a compaction: look again


def read(snapshot: Snapshot, damage: DamageLog, verified: RememberedReads) -> Admissions:
    """Return the sync records and one row for each shard, with its state. An admitted shard is compared with its
    record. A shard that no record names yet is read. Refused shards, and shards that were given up, are described from
    the records alone. Problems are added to `damage`; damaged sync records are left out."""
    recorded = sync_records(snapshot, damage)
    compactions, all_read = read_compactions(snapshot, damage)
    admitted = {shard.key: (record, shard) for record in recorded for shard in record.shards}
    wanted = {(key, shard.sha256) for key, (_, shard) in admitted.items()} | _inherited(snapshot, compactions)
    holding = [it for it in compactions if any((part.shard.key, part.shard.sha256) in wanted for part in it.parts)]
    given = given_up(snapshot.run, damage.looking_at).shards
    own = [shard for key, (_, shard) in admitted.items() if key in snapshot.files and key not in given]
    good, problems = _verified(snapshot, holding, own, verified)
    placed = places(it for it in holding if it.object in good)
    lost = places(it for it in holding if it.object not in good)
    objects = _ShardObjects(snapshot, good, problems, placed, lost, damage)
    rows = [
        objects.described(record, shard) | {"state": "given up"} if key in given else objects.admitted(record, shard)
        for key, (record, shard) in admitted.items()
    ]
    rows += _refused(recorded, admitted)
    spoken_of = {row["key"] for row in rows}
    rows += objects.replayed(spoken_of)
    spoken_of |= {row["key"] for row in rows}
    waiting = [key for key in snapshot.keys(layout.TRAJECTORIES) if key not in spoken_of]
    rows += _waiting(snapshot, waiting, damage, verified)
    objects.note_compactions(rows)
    missing = {row["key"] for row in rows if row["state"] == "missing"}
    unreadable = {row["key"] for row in rows if row["state"] == "unreadable"}
    gone = [key for key in (missing | unreadable) & snapshot.files.keys() if not snapshot.files[key].exists()]
    lost_since = missing and any(it == IS_MISSING and key in snapshot.files for key, it in problems.items())
    lacks_objects = any(it.problem.startswith(IS_MISSING) for it in damage.found())
    rows.sort(key=lambda row: row["key"])
    return Admissions(recorded, rows, lacks_objects=lacks_objects, has_moved=bool(not all_read or gone or lost_since))


# --- records --------------------------------------------------------------------------------------------------------


def sync_records(snapshot: Snapshot, damage: DamageLog) -> list[SyncRecord]:
    """Return the sync records in order. Add to `damage` the records that are damaged, missing, or contradicted by the
    next record; they are left out."""
    found: dict[int, SyncRecord] = {}
    digests: dict[int, str] = {}
    for key, data in snapshot.read_all(layout.SYNCS, damage):
        with damage.looking_at(key):
            record = decode_sync(data, key)
            if layout.sync(record.sync) != key:
                raise Damaged(f"{key} says it is record {record.sync}")
            tables.fitting([tables.sync_row(record)], tables.SYNCS)
            tables.fitting([*map(vars, record.shards), *map(vars, record.refused)], tables.SHARDS)
            found[record.sync], digests[record.sync] = record, sha256(data).hexdigest()
    for number in range(_expected_records(snapshot)):
        if layout.sync(number) not in snapshot.files:
            damage.add(layout.sync(number), f"{IS_MISSING}, though later syncs are there")
    for number in sorted(found, reverse=True):
        wrong = _contradiction(number, found, digests)
        if wrong is not None:
            del found[wrong]
            other = number if wrong != number else number + 1
            damage.add(layout.sync(wrong), f"does not fit record {other}: one of the two was changed")
    return [found[number] for number in sorted(found)]


def _expected_records(snapshot: Snapshot) -> int:
    """Return the number of sync records that must exist: one more than the newest sync that has a record, an object of
    the ledger, or a checkpoint. The record of a sync is written before its ledger, and the ledger before its
    checkpoint."""
    numbers = [sync + 1 for key in snapshot.keys(layout.SYNCS) if (sync := layout.parse_sync(key)) is not None]
    for folder in (layout.STEPS, layout.DRAWS):
        numbers += [name.number + 1 for key in snapshot.keys(folder) if (name := layout.parse_ledger(key))]
    numbers += [it[0].number + 1 for key in snapshot.keys(layout.CHECKPOINTS) if (it := layout.parse_folder(key))]
    return max(numbers, default=0)


def _contradiction(number: int, found: Mapping[int, SyncRecord], digests: Mapping[int, str]) -> int | None:
    """Compare record `number` with the sha256 that the next record holds of it. Return None if they fit, else the
    number of the record that is wrong. If the record after next holds the right sha256 of the next one, record `number`
    is wrong; otherwise the next one is."""
    after, last = found.get(number + 1), found.get(number + 2)
    if after is None or after.previous_sha256 == digests[number]:
        return None
    return number if last and last.previous_sha256 == digests[number + 1] else number + 1


def read_compactions(snapshot: Snapshot, damage: DamageLog) -> tuple[list[Compaction], bool]:
    """Return the compactions whose records can be read. The second value is False if a listed record is gone: another
    compaction has taken over its shards, and the caller must list again."""
    keys = [key for key in snapshot.keys(layout.COMPACTIONS) if is_record(key)]
    data = dict(snapshot.read_all(layout.COMPACTIONS, damage, only=is_record))
    found: list[Compaction] = []
    for key in data:
        with damage.looking_at(key):
            found.append(decode_compaction(data[key], key))
    return found, all(key in data or key in damage for key in keys)


# --- shards ---------------------------------------------------------------------------------------------------------


def _verified(
    snapshot: Snapshot, compactions: Sequence[Compaction], own: Sequence[Shard], verified: RememberedReads
) -> tuple[frozenset[str], dict[str, str]]:
    """Compare the objects of compactions and shards with their records. Return the keys of the objects that match, and
    by key what is wrong with each of the others."""
    expectations = {it.object: Digest(it.bytes, it.sha256) for it in compactions}
    expectations |= {shard.key: Digest(shard.bytes, shard.sha256) for shard in own}
    good, damaged = verify(snapshot, expectations, verified)
    return good, {it.key: it.problem for it in damaged}


@dataclass(frozen=True)
class _ShardObjects:
    """The objects that hold admitted shards: which of them match their records, and what is wrong with the others."""

    snapshot: Snapshot
    good: frozenset[str]
    problems: Mapping[str, str]
    placed: Mapping[Name, Place]
    lost: Mapping[Name, Place]  # places in compactions that are damaged or missing
    damage: DamageLog

    def described(self, record: SyncRecord, shard: Shard) -> Row:
        """Return the columns of a shard's row that follow from the sync record which admits the shard."""
        searcher, seq = layout.parse_shard(shard.key) or (None, None)
        said = {"rows": shard.rows, "bytes": shard.bytes, "sha256": shard.sha256}
        return {"key": shard.key, "searcher": searcher, "seq": seq, **said, "sync": record.sync, "step": record.step}

    def admitted(self, record: SyncRecord, shard: Shard) -> Row:
        row = self.described(record, shard)
        name = shard.key, shard.sha256
        if place := self.placed.get(name):
            return {**row, "state": "admitted", "place": place}
        if shard.key in self.good:
            return {**row, "state": "admitted"}
        if shard.key not in self.problems and (place := self.lost.get(name)):
            return {**row, **self._lost_in(place)}
        problem = self.problems.get(shard.key, IS_MISSING)
        self.damage.add(shard.key, problem)
        return {**row, "state": "missing"} if problem == IS_MISSING else {**row, "state": "damaged", "reason": problem}

    def replayed(self, spoken_of: set[str]) -> list[Row]:
        """Return the rows of shards that lie in compactions and that no sync record admits yet. There are such shards
        only in a replay; for any other run, return an empty list."""
        inherits = self.snapshot.run.inherits
        if not inherits or not inherits.replays:
            return []
        rows: dict[str, Row] = {}
        for (key, digest), place in {**self.lost, **self.placed}.items():
            if key not in spoken_of and inherits.inherits(key):
                shard, is_lost = place.part.shard, (key, digest) not in self.placed
                state = self._lost_in(place) if is_lost else {"state": "waiting", "place": place}
                said = {"rows": shard.rows, "bytes": shard.bytes, "sha256": digest if is_lost else None}
                rows[key] = {"key": key, "searcher": shard.searcher, "seq": shard.seq, **said, **state}
        return [row for row in rows.values() if row["state"] == "waiting" or row["key"] not in self.snapshot.files]

    def _lost_in(self, place: Place) -> Row:
        problem = self.problems[place.compaction.object]
        state = "missing" if problem == IS_MISSING else "damaged"
        return {"state": state, "reason": f"lies in {place.compaction.object}, which {problem}"}

    def note_compactions(self, rows: Iterable[Row]) -> None:
        """Add damaged and missing compactions to the damage, if `rows`, which are those of the view `shards`, have a
        missing or damaged shard that lies in them."""
        names = [(row["key"], row.get("sha256", "")) for row in rows if row["state"] in ("missing", "damaged")]
        held = Counter(self.lost[name].compaction.object for name in names if name in self.lost)
        for key, shards in held.items():
            self.damage.add(key, f"{self.problems[key]}; {shards} shards lie in it")


def _refused(recorded: Sequence[SyncRecord], admitted: Mapping[str, Any]) -> list[Row]:
    """Return a row for each refused object, including objects whose names are not those of shards."""
    refused = {refusal.key: refusal.reason for record in recorded for refusal in record.refused}
    rows: list[Row] = []
    for key, reason in refused.items():
        if key not in admitted:
            searcher, seq = layout.parse_shard(key) or (None, None)
            rows.append({"key": key, "searcher": searcher, "seq": seq, "state": "refused", "reason": reason})
    return rows


def _inherited(snapshot: Snapshot, compactions: Iterable[Compaction]) -> set[Name]:
    """Return the shards that the parent of a replay has compacted, whether or not a sync record of the replay admits
    them yet. For any other run, return an empty set."""
    inherits = snapshot.run.inherits
    if not inherits or not inherits.replays:
        return set()
    shards = (part.shard for compaction in compactions for part in compaction.parts)
    return {(shard.key, shard.sha256) for shard in shards if inherits.inherits(shard.key)}


# --- shards that wait -----------------------------------------------------------------------------------------------


def _waiting(snapshot: Snapshot, keys: Sequence[str], damage: DamageLog, verified: RememberedReads) -> list[Row]:
    """Return the rows of shards that no sync record names: the next record will admit or refuse them. Shards that
    cannot be read get the state `unreadable`, and queries leave them out. If a sync record is damaged or missing, it
    may have admitted some of these shards, so their `reason` names that record."""
    said = read_whole(snapshot, keys, "rows", _read_rows, verified)
    lost = next((it.key for it in damage.found() if it.key.startswith(layout.SYNCS)), None)
    unsure: Row = {"reason": f"{lost} is damaged or missing, and may have admitted it"} if lost else {}
    rows: list[Row] = []
    for key in keys:
        searcher, seq = layout.parse_shard(key) or (None, None)
        problem = said.get(key, {}).get("problem")
        state = {"state": "unreadable", "reason": problem} if problem else _by_footer(snapshot.files[key])
        rows.append({"key": key, "searcher": searcher, "seq": seq, **unsure, **state})
        if state["state"] == "unreadable":
            damage.add(key, state["reason"])
    return rows


def _read_rows(path: Path) -> dict[str, str]:
    try:
        parquet.decode(path.read_bytes(), path.name)
    except Damaged as error:
        return {"problem": str(error).removeprefix(path.name).strip()}
    return {"problem": ""}


def _by_footer(path: Path) -> Row:
    try:
        with pq.ParquetFile(path) as file:
            found, rows = file.schema_arrow, file.metadata.num_rows
            written = (found.metadata or {}).get(b"schema_version", b"").decode(errors="replace")
        size = path.stat().st_size
    except (pa.ArrowException, OSError, ValueError) as error:
        return {"state": "unreadable", "reason": first_line(error)}
    if written != str(SCHEMA_VERSION):
        return {"state": "unreadable", "reason": f"has schema version {written or 'none'}, not {SCHEMA_VERSION}"}
    for field in TRAJECTORY_SCHEMA:
        types = [found.field(place).type for place in found.get_all_field_indices(field.name)]
        if types != [field.type] and (types or field.name not in LATER):
            return {"state": "unreadable", "reason": f"has another schema: see column {field.name!r}"}
    return {"state": "waiting", "rows": rows, "bytes": size}
