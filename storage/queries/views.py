"""Shows a run as tables: `connect(run)` returns an in-memory DuckDB connection that can read this run and nothing else.

A connection can be made even if objects are damaged or missing, as long as `run.json` is intact. Objects that are found
not to match their record, or that cannot be read, are rows of the view `damage` and are left out of all other views.

A connection shows what was stored when it was made; connect again to see more. Small records become tables. Parquet
objects are read when a query asks for them, through handles that the connection holds. So no query needs the file
system, and DuckDB is told to refuse all access to it: SQL can neither read nor write files.
"""

import re
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow import fs

from storage import layout
from storage.local_files.remembered_reads import RememberedReads
from storage.log.compactions import FACTS, Place
from storage.log.ledger import DRAWS_SCHEMA
from storage.log.prompts import PROMPTS_SCHEMA
from storage.log.schema import TRAJECTORY_SCHEMA
from storage.objects.damage import DamageLog
from storage.queries import admitted_shards, evaluation_tables, mirror, readable_objects, tables
from storage.queries.admitted_shards import Admissions
from storage.queries.mirror import Progress, Snapshot
from storage.runs.attempts import Span, accepts, readable_chain
from storage.runs.run import Run, resolve

_SQL = [files("storage.queries").joinpath(f"sql/{name}.sql").read_text() for name in ("views", "macros", "comments")]
# draws_all and steps_all have the columns of draws and steps, with the same meaning.
_SQL += [
    re.sub(r"column (\w+)", r"column \1_all", comment, count=1)
    for comment in re.findall(r"^comment on column (?:draws|steps)\..*;$", _SQL[-1], re.MULTILINE)
]

_PARQUET = ds.ParquetFileFormat(
    default_fragment_scan_options=ds.ParquetFragmentScanOptions(page_checksum_verification=True)
)
_COMPUTED = ("version_step", "age")  # columns that the view of trajectories computes
SHARE_OF_MEMORY = 0.5  # the share of memory that a query may take; the roles of a run may need the rest
_DUCKDBS_SHARE = 0.8  # the share of memory that DuckDB takes by default
_LOCKED = (
    "create macro pandas_scan(pointer) as table select error('there is nothing to scan')",  # null kills the process
    "set enable_external_access = false",  # SQL can read neither files nor Python variables
    "set disabled_filesystems = 'LocalFileSystem'",  # otherwise SQL that logs to a file aborts the process
    "set autoload_known_extensions = false",
    "set autoinstall_known_extensions = false",
    "set allow_community_extensions = false",
    "set lock_configuration = true",
)


@dataclass(frozen=True)
class Stored:
    """The tables from which views are made, with what the run had stored when it was read."""

    small: Mapping[str, pa.Table]
    large: Mapping[str, ds.Dataset]

    def connect(self) -> duckdb.DuckDBPyConnection:
        """Return a connection to a new database with the views. It shares no settings, logs, tables or variables with
        other connections."""
        # Nothing is spilled to the working directory. One thread is faster than several while everything is small.
        con = duckdb.connect(":memory:", config={"temp_directory": "", "threads": 1})
        con.execute("set TimeZone = 'UTC'")
        con.execute("begin")  # one transaction is faster than one for each statement
        con.execute("create schema stored")
        con.execute("use stored")
        for name, table in self.small.items():
            con.from_arrow(table).create(name)
        for name, relation in self.large.items():
            con.from_arrow(relation).create_view(name)
        con.execute("use main")
        con.execute("\n".join(_SQL))
        con.execute("commit")
        con.execute("reset threads")
        con.execute(f"set memory_limit = '{memory_limit(con)}'")
        for statement in _LOCKED:
            con.execute(statement)
        return con


def connect(run: str | Run, *, progress: Progress | None = None, thorough: bool = False) -> duckdb.DuckDBPyConnection:
    """Return a connection with the views of a run. The run is given as a name under the default root, a path or a URL.
    New objects of a remote run are copied to this machine first; `progress` is called with the number of copied objects
    and the number of all objects to copy. Local files that have not been verified before are read: the newest 2 GiB of
    them, or all if `thorough`. Files that are not read are compared with their records by size alone."""
    run = run if isinstance(run, Run) else Run.open(resolve(run))
    return read_stored(run, progress=progress, thorough=thorough).connect()


def read_stored(run: Run, *, progress: Progress | None = None, thorough: bool = False) -> Stored:
    """Read a run once. Any number of connections can be made from the result, and all of them see the same data."""
    damage, verified = DamageLog(), RememberedReads(run.url, most=sys.maxsize if thorough else None)
    snapshot, admissions = _look(run, progress, damage, verified)
    attempts = dict(snapshot.read_all(layout.ATTEMPTS, damage))
    spans = readable_chain(attempts, readable_objects.ledger_names(snapshot), damage)
    large = _large(snapshot, spans, admissions, damage, verified)
    stored = Stored(_small(snapshot, spans, admissions, damage), large)
    verified.save()
    return stored


def _look(
    run: Run, progress: Progress | None, damage: DamageLog, verified: RememberedReads
) -> tuple[Snapshot, Admissions]:
    """Take a snapshot of a run and read its sync records and shards. If listed objects are gone, because a live run may
    just be compacted, pause and do this again; after a few pauses, accept the result. If an object was not listed at
    all, repeat this once: while a compaction replaces objects, a listing may show neither the old object nor the new
    one."""
    pauses = list(mirror.PAUSES)
    while True:
        noted = DamageLog()
        snapshot = mirror.take_snapshot(run.for_reading(noted.looking_at), progress=progress)
        found = admitted_shards.read(snapshot, noted, verified)
        is_first = len(pauses) == len(mirror.PAUSES)
        if not pauses or not (found.has_moved or (found.lacks_objects and is_first)):
            damage.add_all(noted)
            return snapshot, found
        time.sleep(pauses.pop(0))


def memory_limit(con: duckdb.DuckDBPyConnection) -> str:
    """Return the memory limit of a query: a share of the memory that DuckDB finds available, which respects the limit
    of a container."""
    [(default,)] = con.execute("select current_setting('memory_limit')").fetchall()
    size, unit = default.split()
    return f"{float(size) * SHARE_OF_MEMORY / _DUCKDBS_SHARE:.4f} {unit}"


def _small(snapshot: Snapshot, spans: Sequence[Span], admitted: Admissions, damage: DamageLog) -> dict[str, pa.Table]:
    """Return the small tables by name. The table of damage comes last, because making the other tables adds to the
    damage."""
    kept = tables.published(snapshot, damage)
    steps_of = tables.steps_of_versions(snapshot, admitted.records, kept, damage)
    return {
        "shards": pa.Table.from_pylist(admitted.shards, tables.SHARDS),
        "syncs": tables.syncs(admitted.records),
        "steps": tables.steps(snapshot, spans, damage),
        "versions": tables.versions(snapshot, spans, kept, steps_of, damage),
        "checkpoints": tables.checkpoints(snapshot, spans, damage),
        "evaluations": evaluation_tables.evaluations(snapshot, spans, damage),
        "examples": evaluation_tables.examples(snapshot, spans, damage),
        "events": tables.events(snapshot, damage),
        "attempts": tables.attempts(snapshot, damage),
        "settings": tables.settings(snapshot),
        "version_steps": tables.version_steps(steps_of),
        "damage": damage.table(),
    }


def _large(
    snapshot: Snapshot, spans: Sequence[Span], admitted: Admissions, damage: DamageLog, verified: RememberedReads
) -> dict[str, ds.Dataset]:
    draws = readable_objects.draws(snapshot, spans, admitted.records, damage, verified)
    return {
        "trajectories": _trajectories(snapshot, admitted.shards),
        "draws": _draws(snapshot, spans, draws),
        "prompts": _prompts(snapshot, readable_objects.prompts(snapshot, damage, verified)),
    }


def _trajectories(snapshot: Snapshot, shards: Sequence[tables.Row]) -> ds.Dataset:
    """Return the rows of readable shards as one dataset. The sync record that admits a shard gives the sync and the
    step of its rows, so these are known without reading the rows. A query for some syncs therefore opens only the
    shards of these syncs and, in compactions, only their row groups."""
    readable = [shard for shard in shards if shard["state"] in ("admitted", "waiting")]
    places = {it["key"]: place for it in readable if (place := it.get("place"))}
    facts = {it["key"]: {name: it.get(name) for name in FACTS} for it in readable if it["key"] not in places}
    extended = _with_extras(snapshot, readable, places)
    loose = _dataset(snapshot, facts, extended, FACTS)
    if not places:
        return loose
    fragments = _of_compactions(snapshot, [(it, places[it["key"]]) for it in readable if it["key"] in places])
    return ds.FileSystemDataset(
        [*(loose.get_fragments() if facts else ()), *fragments], loose.schema, _PARQUET, fs.LocalFileSystem()
    )


def _of_compactions(snapshot: Snapshot, shards: Sequence[tuple[tables.Row, Place]]) -> list[ds.Fragment]:
    """Return fragments with the row groups of these shards, usually one fragment per compaction. In a replay, other
    sync records admit a shard than in its parent, but the compaction names only the parent's. Such shards get one
    fragment for each sync record of the replay."""
    grouped: defaultdict[tuple[str, int | None, int | None, bool], list[Place]] = defaultdict(list)
    for row, place in shards:
        admitted = row.get("sync"), row.get("step")
        as_stored = admitted == (place.part.sync, place.part.step)
        sync, step = (None, None) if as_stored else admitted
        grouped[place.compaction.object, sync, step, as_stored].append(place)
    return [
        _PARQUET.make_fragment(
            str(snapshot.files[key]),
            fs.LocalFileSystem(),
            _ranges(found) if as_stored else _guarantee({"sync": sync, "step": step}),
            row_groups=[group for place in found for group in place.part.groups],
        )
        for (key, sync, step, as_stored), found in grouped.items()
    ]


def _ranges(places: Sequence[Place]) -> ds.Expression:
    syncs, steps = ([getattr(place.part, name) for place in places] for name in ("sync", "step"))
    within_syncs = (pc.field("sync") >= min(syncs)) & (pc.field("sync") <= max(syncs))
    return within_syncs & (pc.field("step") >= min(steps)) & (pc.field("step") <= max(steps))


def _with_extras(snapshot: Snapshot, shards: Sequence[tables.Row], places: Mapping[str, Place]) -> pa.Schema:
    """Return the schema of trajectories with the columns that a task has added. The added columns are looked for in the
    oldest and the newest shard of each searcher. Names of columns are compared without regard to case. An added column
    is left out if the view already has a column of its name, or if two of these shards spell its name with different
    capitals or give it different types. A column that only some of these shards have is kept."""
    oldest = {shard["searcher"]: shard["key"] for shard in reversed(shards)}
    newest = {shard["searcher"]: shard["key"] for shard in shards}
    objects = {places[key].compaction.object if key in places else key for key in (*oldest.values(), *newest.values())}
    own = {name.lower() for name in (*TRAJECTORY_SCHEMA.names, *FACTS, *_COMPUTED)}
    found: defaultdict[str, list[pa.Field]] = defaultdict(list)
    for key in sorted(objects):
        try:
            schema = pq.read_schema(snapshot.files[key])
        except (pa.ArrowException, OSError, ValueError):  # just damaged or removed: a query that reads the object fails
            continue
        for field in schema:
            found[field.name.lower()].append(field)
    extras = [fields[0] for name, fields in found.items() if name not in own and _are_one(fields)]
    return pa.schema([*TRAJECTORY_SCHEMA, *extras])


def _are_one(fields: Sequence[pa.Field]) -> bool:
    return all((field.name, field.type) == (fields[0].name, fields[0].type) for field in fields)


def _prompts(snapshot: Snapshot, keys: Sequence[str]) -> ds.Dataset:
    facts = {key: {"split": layout.parse_prompts(key)} for key in keys}
    return _dataset(snapshot, facts, PROMPTS_SCHEMA, {"split": pa.string()})


def _draws(snapshot: Snapshot, spans: Sequence[Span], keys: Sequence[str]) -> ds.Dataset:
    facts = {}
    for key in keys:
        if name := layout.parse_ledger(key):
            facts[key] = {"sync": name.number, "attempt": name.attempt, "abandoned": not accepts(spans, name)}
    columns = {"sync": pa.int32(), "attempt": pa.int32(), "abandoned": pa.bool_()}
    return _dataset(snapshot, facts, DRAWS_SCHEMA, columns)


def _dataset(
    snapshot: Snapshot, facts: Mapping[str, Mapping[str, Any]], schema: pa.Schema, columns: Mapping[str, pa.DataType]
) -> ds.Dataset:
    """Return Parquet objects as one dataset. `facts` has, for each object, the values of the additional `columns`,
    which are the same in all its rows."""
    schema = pa.schema([*tables.naive(schema), *(pa.field(name, kind) for name, kind in columns.items())])
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
