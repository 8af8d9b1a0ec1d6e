"""Every record against every object: what is damaged, missing, doubled or contradicts itself.

Reads the store itself, never a copy of it, and changes nothing. A run may be live: what is merely under way (shards
that wait for the next record, a ledger that is being written, uploads without a manifest) is noted and not held
against it.
"""

import hashlib
import io
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from storage import folders, layout, records
from storage.attempts import Attempt, Span, chain, read_attempt
from storage.retention import GivenUp, given_up
from storage.run import Run
from storage.store import check_key
from storage.trajectories import read_shard
from storage.views import counts, ledger_name, stands
from tba.errors import Damaged, Missing, StorageError
from tba.types import Version

CHECK_SQL = files("storage").joinpath("sql/check.sql").read_text()

_SHOWN = 20  # of one kind of problem; the rest is counted
_LIGHT = (
    "trajectory_id", "searcher", "round", "slot", "prompt_id", "version_start", "version_start_attempt",
    "version_end", "version_end_attempt",
)  # fmt: skip

Tell = Callable[[int, int], None]


@dataclass(frozen=True)
class Problem:
    key: str
    problem: str


@dataclass
class Findings:
    """What a check looked at and what it found."""

    run: str
    checked: dict[str, int] = field(default_factory=dict)  # how many of each kind
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # nothing wrong, but worth knowing

    @property
    def ok(self) -> bool:
        return not self.problems


def check(run: Run, *, progress: Tell | None = None) -> Findings:
    """Look at everything a run has stored."""
    return _Check(run, progress or (lambda done, total: None)).everything()


@dataclass(frozen=True)
class _Record:
    """A sync record that could be read."""

    key: str
    sync: int
    step: int
    shards: Sequence[dict[str, Any]]
    refused: Sequence[dict[str, Any]]


class _Check:
    def __init__(self, run: Run, progress: Tell):
        self.run, self.store, self.progress = run, run.store, progress
        self.findings = Findings(run.name)
        # What refers is listed before what it refers to, so that a live run is never accused of what it did meanwhile.
        self.listed = {
            prefix: [entry.key for entry in run.store.list(prefix)]
            for prefix in (
                layout.EVALUATIONS, layout.CHECKPOINTS, layout.VERSIONS, layout.STEPS, layout.DRAWS, layout.SYNCS,
                layout.TRAJECTORIES, layout.PROMPTS, layout.ATTEMPTS, layout.EVENTS, layout.ROLES,
            )
        }  # fmt: skip
        self.done, self.total = 0, sum(len(_whole(keys)) for keys in self.listed.values())
        self.tables: dict[str, pa.Table] = {}

    def everything(self) -> Findings:
        attempts, spans = self.attempts()
        sync_records = self.sync_records()
        self.shards(sync_records)
        removed = self.given_up()
        kept = {prefix: self.folders(prefix, removed) for prefix in (layout.VERSIONS, layout.CHECKPOINTS)}
        evaluated = self.evaluations({*kept[layout.VERSIONS], *removed.versions})
        reached = [
            name for name in (*kept[layout.VERSIONS], *kept[layout.CHECKPOINTS], *evaluated) if stands(spans, name)
        ]
        self.continued(attempts, {*kept[layout.CHECKPOINTS], *removed.checkpoints})
        self.ledger(spans, sync_records, max((name.number for name in reached), default=0))
        self.prompts()
        self.small_records()
        self.relations({*kept[layout.VERSIONS], *removed.versions})
        self.progress(self.total, self.total)
        return self.findings

    # --- what is found ----------------------------------------------------------------------------------------------

    def wrong(self, key: str, problem: str) -> None:
        self.findings.problems.append(Problem(key, problem))

    def note(self, note: str) -> None:
        self.findings.notes.append(note)

    def count(self, kind: str, number: int = 1) -> None:
        self.findings.checked[kind] = self.findings.checked.get(kind, 0) + number

    @contextmanager
    def looking_at(self, key: str) -> Iterator[None]:
        """Whatever is said to be wrong with an object is a finding about it. A store that does not answer is no
        finding: that ends the check."""
        try:
            yield
        except Missing:
            self.wrong(key, "is missing")
        except (Damaged, pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
            reason = f"lacks {error}" if isinstance(error, KeyError) else str(error).splitlines()[0]
            self.wrong(key, reason.removeprefix(f"{self.store.url}/").removeprefix(key).strip(" :"))
        self.done += 1
        self.progress(min(self.done, self.total), self.total)

    # --- records ----------------------------------------------------------------------------------------------------

    def attempts(self) -> tuple[list[Attempt], list[Span]]:
        found: list[Attempt] = []
        for key in self.listed[layout.ATTEMPTS]:
            with self.looking_at(key):
                found.append(read_attempt(self.run, int(key.removeprefix(layout.ATTEMPTS).removesuffix(".json"))))
        self.count("attempts", len(found))
        for number in range(1, max((attempt.number for attempt in found), default=0) + 1):
            if layout.attempt(number) not in self.listed[layout.ATTEMPTS]:
                self.wrong(layout.attempt(number), "is missing")
        try:
            return found, chain(self.run)
        except (Missing, Damaged):  # found above; without a chain every ledger is checked by itself alone
            return found, []

    def continued(self, attempts: Sequence[Attempt], checkpoints: set[Version]) -> None:
        for attempt in attempts:
            if attempt.continues and attempt.continues not in checkpoints:
                self.wrong(
                    layout.attempt(attempt.number),
                    f"continues checkpoint {attempt.continues}, which is neither stored nor given up",
                )

    def sync_records(self) -> list[_Record]:
        """The records in order: no gap, each with the hash of the one before it, no shard admitted twice."""
        found: list[_Record] = []
        admitted: dict[str, str] = {}
        previous: str | None = None
        for number, key in enumerate(self.listed[layout.SYNCS]):
            if key != layout.sync(number):
                self.wrong(layout.sync(number), f"is missing, but {key} exists")
                break
            with self.looking_at(key):
                data = self.store.read(key)
                record = records.decode(data, f"{self.store.url}/{key}", "sync", "step", "shards", "refused", "rows")
                if record["sync"] != number:
                    self.wrong(key, f"says it is sync {record['sync']}")
                if record["previous_sha256"] != previous:
                    self.wrong(key, "its hash of the record before it does not fit: one of the two was changed")
                if record["rows"] != sum(shard["rows"] for shard in record["shards"]):
                    self.wrong(key, f"says it admits {record['rows']} rows, its shards have another number")
                for shard in record["shards"]:
                    if shard["key"] in admitted:
                        self.wrong(key, f"admits {shard['key']}, which {admitted[shard['key']]} had admitted already")
                    admitted[shard["key"]] = key
                found.append(_Record(key, number, record["step"], record["shards"], record["refused"]))
                previous = hashlib.sha256(data).hexdigest()
        self.count("sync records", len(found))
        return found

    def given_up(self) -> GivenUp:
        with self.looking_at(layout.RETENTION):
            return given_up(self.run)
        return GivenUp(versions=frozenset(), checkpoints=frozenset())

    def evaluations(self, published: set[Version]) -> list[Version]:
        found: list[Version] = []
        for key in self.listed[layout.EVALUATIONS]:
            with self.looking_at(key):
                record = records.read(self.store, key, "version", "attempt", "step", "scores")
                version = Version(record["version"], record["attempt"])
                if key != layout.evaluation(version):
                    self.wrong(key, f"says it is of version {version}")
                if version not in published:
                    self.wrong(key, f"evaluates version {version}, which is neither stored nor given up")
                if not record["scores"]:
                    self.wrong(key, "has no scores")
                found.append(version)
        self.count("evaluations", len(found))
        return found

    def small_records(self) -> None:
        """What nothing refers to, but what must be readable."""
        for key in (*self.listed[layout.EVENTS], *self.listed[layout.ROLES], layout.STATE):
            if key != layout.STATE or self.store.exists(key):
                with self.looking_at(key):
                    records.read(self.store, key)
        self.count("events", len(self.listed[layout.EVENTS]))

    # --- shards -----------------------------------------------------------------------------------------------------

    def shards(self, sync_records: Sequence[_Record]) -> None:
        """What records say of each shard, and every shard by itself."""
        light = [_empty_light()]
        shards: list[dict[str, Any]] = []
        for record in sync_records:
            for shard in record.shards:
                with self.looking_at(shard["key"]):
                    searcher, seq = layout.parse_shard(shard["key"]) or (None, None)
                    shards.append(
                        {
                            "searcher": searcher,
                            "seq": seq,
                            "rows": shard["rows"],
                            "sync": record.sync,
                            "step": record.step,
                        }
                    )
                    table = self._admitted(shard)
                    light.append(_light(table, record.sync, record.step))
        self.count("shards", len(shards))
        light += self._waiting(sync_records)
        self.tables["trajectories"] = pa.concat_tables(light)
        self.tables["shards"] = pa.Table.from_pylist(
            shards, pa.schema({name: pa.int64() for name in ("searcher", "seq", "rows", "sync", "step")})
        )
        self.count("trajectories", self.tables["trajectories"].num_rows)

    def _admitted(self, shard: dict[str, Any]) -> pa.Table:
        key, data = shard["key"], self.store.read(shard["key"])
        if len(data) != shard["bytes"]:
            raise Damaged(f"has {len(data)} bytes, its record says {shard['bytes']}")
        if hashlib.sha256(data).hexdigest() != shard["sha256"]:
            raise Damaged("has not the content that was admitted (sha256 differs)")
        table = read_shard(self.run.name, key, data)
        if table.num_rows != shard["rows"]:
            raise Damaged(f"has {table.num_rows} rows, its record says {shard['rows']}")
        return table

    def _waiting(self, sync_records: Sequence[_Record]) -> list[pa.Table]:
        """Shards that no record speaks of, and those that one has refused."""
        refused = {shard["key"]: shard["reason"] for record in sync_records for shard in record.refused}
        spoken_of = {shard["key"] for record in sync_records for shard in record.shards} | refused.keys()
        light: list[pa.Table] = []
        for key in self.listed[layout.TRAJECTORIES]:
            if key in refused:
                self.note(f"{key} was refused: {refused[key]}")
            elif layout.parse_shard(key) is None:
                self.note(f"{key} is not a shard and is never read")
            elif key not in spoken_of:
                with self.looking_at(key):
                    light.append(_light(read_shard(self.run.name, key, self.store.read(key)), None, None))
        if light:
            self.note(f"{len(light)} shards with {sum(map(len, light))} trajectories wait for the next sync")
        return light

    # --- the ledger -------------------------------------------------------------------------------------------------

    def ledger(self, spans: Sequence[Span], sync_records: Sequence[_Record], reached: int) -> None:
        """The ledger of the chain has no gap up to the newest sync that it, a version or a checkpoint has reached."""
        names = {prefix: set(map(ledger_name, self.listed[prefix])) for prefix in (layout.STEPS, layout.DRAWS)}
        standing = {name for name in (*names[layout.STEPS], *names[layout.DRAWS]) if counts(spans, name)}
        newest = max((name.number for name in standing), default=0)
        expected = [
            Version(sync, span.attempt)
            for sync in range(1, max(newest, reached) + 1)
            for span in spans
            if span.covers(sync)
        ]
        tables: dict[str, list[pa.Table]] = {layout.STEPS: [], layout.DRAWS: []}
        readable: list[str] = []
        for prefix, name_of in ((layout.STEPS, layout.steps), (layout.DRAWS, layout.draws)):
            for name in sorted(names[prefix] | set(expected), key=lambda name: name.order):
                key = name_of(name.number, name.attempt)
                with self.looking_at(key):
                    table = self._ledger_table(key, name)
                    if name in expected:
                        tables[prefix].append(table)
                        readable.append(key)
        abandoned = (names[layout.STEPS] | names[layout.DRAWS]) - standing
        if abandoned:
            self.note(f"{len(abandoned)} syncs of attempts that were given up after a crash are kept in the ledger")
        newest_record = max((record.sync for record in sync_records), default=0)
        if newest_record > max(newest, reached):
            self.note(f"the steps up to record {newest_record} are not in the ledger yet, those up to {newest} are")
        self._keep_ledger(tables, readable, expected, sync_records)

    def _ledger_table(self, key: str, name: Version) -> pa.Table:
        table = pq.read_table(io.BytesIO(self.store.read(key)), page_checksum_verification=True)
        self.count("ledger objects")
        if key.startswith(layout.STEPS):
            for column, wanted in (("sync", name.number), ("attempt", name.attempt)):
                if set(table[column].to_pylist()) - {wanted}:
                    raise Damaged(f"has rows of another {column} than its name says")
            columns = ["step"]
        else:
            columns = ["step", "slot", "position", "trajectory_id", "prompt_id"]
        table = table.select(columns)
        return table.append_column("key", pa.array([key] * len(table), pa.string())).append_column(
            "sync", pa.array([name.number] * len(table), pa.int32())
        )

    def _keep_ledger(
        self,
        tables: dict[str, list[pa.Table]],
        readable: Sequence[str],
        expected: Sequence[Version],
        sync_records: Sequence[_Record],
    ) -> None:
        steps_of = {record.sync: record.step for record in sync_records}
        places = {"key": pa.string(), "sync": pa.int32()}
        steps = pa.schema({"step": pa.int32(), **places})
        draws = pa.schema(
            {
                "step": pa.int32(), "slot": pa.int32(), "position": pa.int32(), "trajectory_id": pa.string(),
                "prompt_id": pa.string(), **places,
            }
        )  # fmt: skip
        self.tables["steps"] = pa.concat_tables([steps.empty_table(), *(t.cast(steps) for t in tables[layout.STEPS])])
        self.tables["drawn"] = pa.concat_tables([draws.empty_table(), *(t.cast(draws) for t in tables[layout.DRAWS])])
        self.tables["readable"] = pa.table({"key": pa.array(readable, pa.string())})
        recorded = [
            {
                "sync": name.number,
                "first_step": steps_of[name.number - 1] + 1,
                "last_step": steps_of[name.number],
                "steps_key": layout.steps(name.number, name.attempt),
                "draws_key": layout.draws(name.number, name.attempt),
            }
            for name in expected
            if name.number in steps_of and name.number - 1 in steps_of
        ]
        numbers = {name: pa.int64() for name in ("sync", "first_step", "last_step")}
        self.tables["recorded"] = pa.Table.from_pylist(
            recorded, pa.schema({**numbers, "steps_key": pa.string(), "draws_key": pa.string()})
        )
        for name in expected:
            if name.number not in steps_of:
                self.wrong(layout.sync(name.number), "is missing, but the ledger has gone past it")
        self.count("steps", self.tables["steps"].num_rows)
        self.count("draws", self.tables["drawn"].num_rows)

    # --- folders and prompts ----------------------------------------------------------------------------------------

    def folders(self, prefix: str, removed: GivenUp) -> list[Version]:
        """Versions or checkpoints that are complete; the files of each against its manifest."""
        gone = removed.versions if prefix == layout.VERSIONS else removed.checkpoints
        kind = prefix.rstrip("/")
        names = {key.split("/")[1] for key in self.listed[prefix]}
        kept: list[Version] = []
        for name in sorted(names):
            folder, version = f"{prefix}{name}/", Version.parse(name)
            if f"{folder}{layout.MANIFEST}" not in self.listed[prefix]:
                self.note(f"{folder} {'is being removed' if version in gone else 'is unfinished: it has no manifest'}")
                continue
            kept.append(version)
            with self.looking_at(folder):
                self._folder(folder, prefix, version, removed=version in gone)
        self.count(kind, len(kept))
        return kept

    def _folder(self, folder: str, prefix: str, version: Version, *, removed: bool) -> None:
        try:
            manifest = records.read(self.store, folder + layout.MANIFEST, "files", "sha256", "attempt")
            for file in manifest["files"]:
                _check_name(folder, file["name"])
            number = manifest["version"] if prefix == layout.VERSIONS else manifest["sync"]
            if (number, manifest["attempt"]) != version:
                raise Damaged(f"its manifest says it is {Version(number, manifest['attempt'])}")
            if self.store.local_path(folder.rstrip("/")) is not None:
                folders.local_copy(self.store, folder)
            else:
                with tempfile.TemporaryDirectory(prefix="tba-check-") as scratch:
                    folders.fetch(self.store, folder, Path(scratch))
        except (Missing, Damaged):
            if removed or not self._still_there(folder, version, prefix):
                self.note(f"{folder} is being removed")
                return
            raise

    def _still_there(self, folder: str, version: Version, prefix: str) -> bool:
        """Whether a folder has not been given up while it was looked at."""
        now = given_up(self.run)
        return version not in (now.versions if prefix == layout.VERSIONS else now.checkpoints)

    def prompts(self) -> None:
        ids: list[pa.Table] = [pa.table({"prompt_id": pa.array([], pa.string())})]
        for key in self.listed[layout.PROMPTS]:
            with self.looking_at(key):
                table = pq.read_table(io.BytesIO(self.store.read(key)), page_checksum_verification=True)
                found = table.select(["prompt_id"])
                doubled = len(found) - len(set(found["prompt_id"].to_pylist()))
                if doubled:
                    self.wrong(key, f"has {doubled} prompt ids twice")
                if key == layout.prompts("train"):
                    ids.append(found)
                self.count("prompts", len(found))
        self.tables["prompts"] = pa.concat_tables(ids)

    # --- how they fit together --------------------------------------------------------------------------------------

    def relations(self, published: set[Version]) -> None:
        """Run every query of check.sql; each row is a problem."""
        training = self.run.config.get("training", {})
        slots, responses = training.get("prompts_per_step"), training.get("responses_per_prompt")
        self.tables["published"] = pa.table(
            {
                "number": pa.array([version.number for version in published], pa.int32()),
                "attempt": pa.array([version.attempt for version in published], pa.int32()),
            }
        )
        self.tables["numbers"] = pa.table(
            {"slots": pa.array([slots], pa.int64()), "responses": pa.array([responses], pa.int64())}
        )
        with duckdb.connect(":memory:", config={"temp_directory": ""}) as con:
            for name, table in self.tables.items():
                con.from_arrow(table).create(name)
            con.execute(_PLACES_OF_DRAWS)
            for statement in con.extract_statements(CHECK_SQL):
                rows = con.execute(statement).fetchall()
                for key, problem in rows[:_SHOWN]:
                    self.wrong(key, problem)
                if len(rows) > _SHOWN:
                    self.wrong(rows[_SHOWN][0], f"… and {len(rows) - _SHOWN} more like this")


_PLACES_OF_DRAWS = """
create table draws as
select
    *,
    try_cast(split_part(trajectory_id, '/', 1) as bigint) as searcher,
    try_cast(split_part(trajectory_id, '/', 2) as bigint) as seq,
    try_cast(split_part(trajectory_id, '/', 3) as bigint) as row
from drawn
"""


def _whole(keys: Sequence[str]) -> list[str]:
    """Of manifest folders, one key each."""
    manifests = [key for key in keys if key.endswith(f"/{layout.MANIFEST}")]
    return manifests or list(keys)


def _check_name(folder: str, name: str) -> None:
    try:
        check_key(folder + name)
    except StorageError as error:
        raise Damaged(f"its manifest names {error}") from None


def _light(table: pa.Table, sync: int | None, step: int | None) -> pa.Table:
    """The columns that relations are checked with."""
    table = table.select(_LIGHT)
    for name, value in (("sync", sync), ("step", step)):
        table = table.append_column(name, pa.array([value] * len(table), pa.int32()))
    return table.cast(_empty_light().schema)


def _empty_light() -> pa.Table:
    text = ("trajectory_id", "prompt_id")
    return pa.schema(
        {
            **{name: pa.string() if name in text else pa.int32() for name in _LIGHT},
            "sync": pa.int32(),
            "step": pa.int32(),
        }
    ).empty_table()
