"""Every record against every object: what is damaged, missing, doubled or contradicts itself.

Reads the store itself, never a copy of it, and changes nothing. A run may be live: what is merely under way (shards
that wait for the next record, a ledger that is being written, uploads without a manifest) is noted and not held
against it.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq

from storage import layout
from storage.local_files.scratch import scratch_folder
from storage.log.compactions import Compaction, Compactions, Part, Place, is_record, places
from storage.log.compactions import decode as decode_compaction
from storage.log.ledger import DRAWS_SCHEMA, LATER, LedgerRecord
from storage.log.prompts import PROMPTS_SCHEMA
from storage.log.schema import with_later
from storage.log.shard_checks import check_compacted, read_shard
from storage.log.syncs import Shard, SyncRecord, decode
from storage.maintenance.check_digests import RecordDigests
from storage.maintenance.read_ahead import ReadAhead
from storage.maintenance.relations import Relations
from storage.objects import manifest_folders, parquet, records
from storage.objects.digests import Digest
from storage.objects.store import Entry, check_key
from storage.queries import tables
from storage.queries.mirror import Progress
from storage.queries.tables import fitting
from storage.runs.attempts import Attempt, Span, accepts, chain, read_attempt, stands
from storage.runs.control import read_state
from storage.runs.inheritance import Parent
from storage.runs.leases import decode_lease
from storage.runs.retention import GivenUp, RetentionRecord, given_up, given_up_payloads
from storage.runs.run import Run
from storage.weights import checkpoint_files
from storage.weights.evaluations import named_before
from tba.errors import Damaged, Missing, StorageError, TBAError
from tba.types import Version

_SHOWN = 20  # names that do not belong to a run; the rest is counted


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


def check(run: Run, *, progress: Progress | None = None) -> Findings:
    """Look at everything a run has stored."""
    return _Check(run, progress or (lambda done, total: None)).everything()


class _Check:
    def __init__(self, run: Run, progress: Progress):
        self.run, self.store, self.progress = run, run.store, progress
        self.findings = Findings(run.name)
        # What refers is listed before what it refers to, so that a live run is never accused of what it did meanwhile.
        entries = {
            prefix: [entry for entry in run.store.list(prefix) if layout.is_part(entry.key)]
            for prefix in (
                layout.EVALUATIONS, layout.CHECKPOINTS, layout.VERSIONS, layout.LEDGER, layout.STEPS, layout.DRAWS,
                layout.SYNCS, layout.TRAJECTORIES, layout.COMPACTIONS, layout.PROMPTS, layout.ATTEMPTS,
                layout.RETENTION, layout.EVENTS, layout.ROLES, layout.FORKS,
            )
        }  # fmt: skip
        self.strangers = [entry.key for entry in run.store.list() if not layout.is_part(entry.key)]
        self.listed = {prefix: [entry.key for entry in found] for prefix, found in entries.items()}
        self.reading = ReadAhead(run.store, [list(filter(_is_read_whole, found)) for found in entries.values()])
        self.records = RecordDigests(run, self.reading)
        self.lost: frozenset[str] = frozenset()  # admitted shards that were given up
        self.payloads: list[RetentionRecord] = []
        self.weights: dict[Version, str | None] = {}  # their sha256, in full precision as in the ledger, by manifests
        self.compactions = Compactions(run)  # as they are when a shard is not where it was listed
        self.opened: tuple[Compaction, pq.ParquetFile] | None = None  # the last: its shards are asked for one by one
        self.done, self.total = 0, sum(len(_whole(keys)) for keys in self.listed.values())
        training = run.config.get("training", {})
        synchronous = run.config.get("sync", {}).get("lag") == 0
        self.ahead = int(synchronous)  # syncs: a version that searchers are waited for with comes before its ledger
        self.relations = Relations(
            slots=training.get("prompts_per_step"), responses=training.get("responses_per_prompt")
        )

    def everything(self) -> Findings:
        attempts, spans = self.attempts()
        sync_records = self.sync_records()
        removed = self.given_up()
        self.lost = removed.shards
        self.shards(sync_records)
        versions, checkpoints = (self.folders(prefix, removed) for prefix in (layout.VERSIONS, layout.CHECKPOINTS))
        published = {*versions, *removed.versions}
        evaluated = self.evaluations(published)
        self.continued(attempts, {*checkpoints, *removed.checkpoints})
        reached = [
            *(name.number for name in checkpoints if stands(spans, name)),
            *(name.number - self.ahead for name in (*versions, *evaluated) if stands(spans, name)),
        ]
        self.ledger(spans, sync_records, reached=max(reached, default=0))
        self.prompts()
        self.forks()
        self.small_records()
        self.what_else_is_there()
        self.relations.add_published({*published, *self.replayed()})
        for key, problem in self.relations.problems():
            self.wrong(key, problem)
        for key, problem in self.records.problems():
            self.wrong_too(key, problem)
        self.unverified()
        self.progress(self.total, self.total)
        return self.findings

    def unverified(self) -> None:
        """Note the records that older versions wrote without a digest."""
        if unverified := self.records.unverified:
            self.note(f"{len(unverified)} records have no digest and are not verified: {unverified[0]} and the like")

    def replayed(self) -> list[Version]:
        """Versions of its parent that a fork which replays may cite beyond those it shares."""
        older = self.run.older
        return [*manifest_folders.complete(older.store, layout.VERSIONS), *given_up(older).versions] if older else []

    # --- what is found ----------------------------------------------------------------------------------------------

    def wrong(self, key: str, problem: str) -> None:
        self.findings.problems.append(Problem(key, problem))

    def wrong_too(self, key: str, problem: str) -> None:
        """Unless something is known to be wrong with the object: one problem is enough to look at it."""
        if all(it.key != key for it in self.findings.problems):
            self.wrong(key, problem)

    def note(self, note: str) -> None:
        self.findings.notes.append(note)

    def count(self, kind: str, number: int = 1) -> None:
        self.findings.checked[kind] = self.findings.checked.get(kind, 0) + number

    @contextmanager
    def looking_at(self, key: str) -> Iterator[None]:
        """Whatever is said to be wrong with an object is a finding about it. A store that does not answer is no
        finding: that ends the check."""
        try:
            with records.reading(key):
                yield
        except Missing:
            self.wrong(key, "is missing")
        except Damaged as error:
            reason = str(error).splitlines()[0].removeprefix(f"{self.store.url}/")
            self.wrong(key, reason.removeprefix(key).strip(" :"))
        except OSError as error:
            if isinstance(error, TBAError):
                raise
            self.wrong(key, f"cannot be read: {error.strerror or error}")
        self.done += 1
        self.progress(min(self.done, self.total), self.total)

    # --- records ----------------------------------------------------------------------------------------------------

    def attempts(self) -> tuple[list[Attempt], list[Span]]:
        found: list[Attempt] = []
        for key in self.listed[layout.ATTEMPTS]:
            with self.looking_at(key):
                fitting([tables.attempt_row(self.records.decode(key))], tables.ATTEMPTS)
                attempt = read_attempt(self.run, layout.parse_attempt(key) or 0)
                self.records.link(key, layout.attempt(attempt.number - 1), attempt.previous_sha256)
                found.append(attempt)
        self.count("attempts", len(found))
        for number in range(1, max((attempt.number for attempt in found), default=0) + 1):
            if layout.attempt(number) not in self.listed[layout.ATTEMPTS]:
                self.wrong(layout.attempt(number), "is missing")
        try:
            with records.reading(layout.ATTEMPTS):
                return found, chain(self.run)
        except (Missing, Damaged):  # found above; without a chain every ledger is checked by itself alone
            return found, []

    def continued(self, attempts: Sequence[Attempt], checkpoints: set[Version]) -> None:
        inherited = self.run.parent.attempts if self.run.parent else 0  # the parent answers for those
        for attempt in attempts:
            if attempt.number > inherited and attempt.continues and attempt.continues not in checkpoints:
                self.wrong(
                    layout.attempt(attempt.number),
                    f"continues checkpoint {attempt.continues}, which is neither stored nor given up",
                )

    def sync_records(self) -> list[SyncRecord]:
        """The records in order: no gap, each with the hash of the one before it, no shard admitted twice."""
        found: list[SyncRecord] = []
        admitted: dict[str, str] = {}
        previous: str | None = None
        for number, key in enumerate(self.listed[layout.SYNCS]):
            if key != layout.sync(number):
                self.wrong(layout.sync(number), f"is missing, but {key} exists")
                break
            with self.looking_at(key):
                data = self.records.read(key)
                record = decode(data, key)
                fitting([tables.sync_row(record)], tables.SYNCS)
                self._sync_record(key, record, found[-1] if found else None)
                if record.previous_sha256 != previous:
                    self.wrong(key, "its hash of the record before it does not fit: one of the two was changed")
                for shard in record.shards:
                    if shard.key in admitted:
                        self.wrong(key, f"admits {shard.key}, which {admitted[shard.key]} had admitted already")
                    admitted[shard.key] = key
                found.append(record)
                previous = hashlib.sha256(data).hexdigest()
        self.count("sync records", len(found))
        return found

    def _sync_record(self, key: str, record: SyncRecord, before: SyncRecord | None) -> None:
        """What a record says of itself and of shards."""
        if layout.sync(record.sync) != key:
            raise Damaged(f"says it is sync {record.sync}")
        if before and record.step <= before.step:
            self.wrong(key, f"follows step {record.step}, not after step {before.step} of the one before")
        for shard in record.shards:
            fitting([vars(shard)], tables.SHARDS)
            if layout.parse_shard(shard.key) != (shard.searcher, shard.seq):
                raise Damaged(f"admits {shard.key!r}, which is not the name of a shard of searcher {shard.searcher}")

    def given_up(self) -> GivenUp:
        for key in self.listed[layout.RETENTION]:
            with self.looking_at(key):
                record = self.records.decode(key, "retention", "removed", "why")
                removed, number = record["removed"], record["retention"]
                if key != layout.retention(number):
                    self.wrong(key, f"says it is record {number}")
                self.records.link(key, layout.retention(number - 1), record.get("previous_sha256"))
                for name in (*removed["versions"], *removed["checkpoints"]):
                    Version.parse(name)
        try:
            with records.reading(layout.RETENTION):
                self.payloads = given_up_payloads(self.run)
                return given_up(self.run)
        except (Missing, Damaged):  # found above
            return GivenUp(versions=frozenset(), checkpoints=frozenset())

    def evaluations(self, published: set[Version]) -> list[Version]:
        found: list[Version] = []
        for key in self.listed[layout.EVALUATIONS]:
            with self.looking_at(key):
                record = self.records.decode(key, "version", "attempt", "step", "scores")
                if before := named_before(record):
                    self.records.link(key, layout.evaluation(before), record["previous"].get("sha256"))
                version = Version(record["version"], record["attempt"])
                if key != layout.evaluation(version):
                    self.wrong(key, f"says it is of version {version}")
                if version not in published:
                    self.wrong(key, f"evaluates version {version}, which is neither stored nor given up")
                if not fitting(tables.score_rows(record), tables.EVALUATIONS):
                    self.wrong(key, "has no scores")
                found.append(version)
        self.count("evaluations", len(found))
        return found

    def forks(self) -> None:
        """What pruning must understand of each fork; and of a fork, that its parent knows what it starts from."""
        for key in self.listed[layout.FORKS]:
            with self.looking_at(key), suppress(Missing):  # of one that was given up before it was made
                if (left := Parent.decode(self.records.decode(key, "fork"), key).run) != self.run.name:
                    self.wrong(key, f"says that it leaves run {left!r}")
        if self.listed[layout.FORKS]:
            self.count("forks", len(self.listed[layout.FORKS]))
        if self.run.older:
            with self.looking_at(layout.RUN):
                origins = self._registered(self.run.older)
                if not origins:
                    raise Damaged(f"its parent has no record of it in {layout.FORKS}: nothing keeps what it needs")
                if self.run.parent not in origins:
                    raise Damaged(f"its parent's record of it in {layout.FORKS} says that it leaves it elsewhere")

    def _registered(self, parent: Run) -> list[Parent]:
        """What its parent's records say of this run; the parent answers for those that cannot be read."""
        found: list[Parent] = []
        for key in (entry.key for entry in parent.own.list(layout.FORKS) if layout.is_part(entry.key)):
            with suppress(Missing, Damaged):
                record = records.read(parent.own, key, "fork")
                if record["fork"] == self.run.name:
                    found.append(Parent.decode(record, key))
        return found

    def small_records(self) -> None:
        """What nothing refers to, but what must be readable."""
        for key in self.listed[layout.EVENTS]:
            with self.looking_at(key):
                event = self.records.decode(key)
                fitting([tables.event_row(event)], tables.EVENTS)
                if before := event.get("previous"):
                    previous = layout.event(key.split("/")[1], event["life"], before["seq"])
                    self.records.link(key, previous, before["sha256"])
        with self.looking_at(layout.RUN):
            self.records.decode(layout.RUN)
        for key in filter(layout.parse_lease, self.listed[layout.ROLES]):
            with self.looking_at(key):
                decode_lease(self.run, key, self.records.read(key))
        with self.looking_at(layout.STATE):
            if self.store.exists(layout.STATE):
                self.records.read(layout.STATE)
                read_state(self.run)
            elif any(layout.parse_lease(key) for key in self.listed[layout.ROLES]):
                raise Missing(layout.STATE)  # it is written before any role is started
        self.count("events", len(self.listed[layout.EVENTS]))

    def what_else_is_there(self) -> None:
        """What somebody else has put there, and writes that never came to an end: never read, and so no problem."""
        if left := self.store.unfinished():
            self.note(f"{len(left)} writes are under way or were never finished: of {left[0]} and the like")
        for key in self.store.irregular():
            if layout.is_part(key):
                self.wrong(key, "is no regular file: nothing can be stored or read under this name until it is moved")
            else:
                self.strangers.append(key)
        for key in self.strangers[:_SHOWN]:
            self.note(f"{key} is not part of a run")
        if len(self.strangers) > _SHOWN:
            self.note(f"{len(self.strangers) - _SHOWN} more objects are not part of a run")

    # --- shards -----------------------------------------------------------------------------------------------------

    def shards(self, sync_records: Sequence[SyncRecord]) -> None:
        """What records say of each shard, and every shard by itself, be it an object of its own or in a compaction."""
        admitted = {shard.key: (shard, record) for record in sync_records for shard in record.shards}
        compactions = self.read_compactions()
        found = places(it for it in compactions if it.object in self.listed[layout.COMPACTIONS])
        for shard, record in admitted.values():
            self.relations.add_shard(shard.searcher, shard.seq, shard.rows, sync=record.sync, step=record.step)
            if shard.key in self.lost:
                self.note(f"{shard.key} was lost, and is given up")
            elif (shard.key, shard.sha256) not in found:
                with self.looking_at(shard.key):
                    table = self._admitted(shard, record)
                    self.relations.add_trajectories(table, sync=record.sync, step=record.step)
        for compaction in compactions:
            self.compaction(compaction, found, admitted)
        self.count("shards", len(admitted))
        self.twice(compactions, found, admitted)
        self.waiting(sync_records)
        self.count("trajectories", self.relations.count("trajectories"))

    def _admitted(self, shard: Shard, record: SyncRecord) -> pa.Table:
        try:
            data = self.reading.read(shard.key)
        except Missing:
            if (place := self._place_now(shard, None)) is None:
                raise
            return self._compacted(place, record)
        if len(data) != shard.bytes:
            raise Damaged(f"has {len(data)} bytes, its record says {shard.bytes}")
        if hashlib.sha256(data).hexdigest() != shard.sha256:
            raise Damaged("has not the content that was admitted (sha256 differs)")
        table = read_shard(self.run.writer_of(shard.key), shard.key, data)
        if table.num_rows != shard.rows:
            raise Damaged(f"has {table.num_rows} rows, its record says {shard.rows}")
        return table

    def read_compactions(self) -> list[Compaction]:
        found: list[Compaction] = []
        for key in self.listed[layout.COMPACTIONS]:
            if is_record(key):
                with self.looking_at(key):
                    try:
                        found.append(decode_compaction(self.records.read(key), key))
                    except Missing:
                        self.note(f"{key} has just been taken the place of")
        if found:
            self.count("compactions", len(found))
        return found

    def compaction(
        self,
        compaction: Compaction,
        found: Mapping[tuple[str, str], Place],
        admitted: Mapping[str, tuple[Shard, SyncRecord]],
    ) -> None:
        """The shards that are to be found in it."""
        pairs = [(part, admitted[part.shard.key]) for part in compaction.parts if part.shard.key in admitted]
        counting = [
            (part, record)
            for part, (shard, record) in pairs
            if shard == part.shard and found.get((shard.key, shard.sha256)) == (compaction, part)
        ]
        if counting:
            with self.looking_at(compaction.object):
                for part, record in counting:
                    table = self._compacted(Place(compaction, part), record)
                    self.relations.add_trajectories(table, sync=record.sync, step=record.step)
        elif compaction.object not in self.listed[layout.COMPACTIONS] and pairs:
            lost = [
                part.shard
                for part, _ in pairs
                if part.shard.key not in self.listed[layout.TRAJECTORIES]
                and (part.shard.key, part.shard.sha256) not in found
                and self._place_now(part.shard, Place(compaction, part)) is None
            ]
            if lost:
                self.wrong(compaction.object, f"is missing, and holds {lost[0].key} and the like")
        if not self._is_inherited(compaction.object):
            for part in compaction.parts:
                said = part.shard.key in admitted and admitted[part.shard.key][0] == part.shard
                if not said and not self._is_new(part.sync):
                    self.wrong(compaction.record, f"holds {part.shard.key}, which no record admits as it says")

    def _is_new(self, sync: int) -> bool:
        """Whether there is a record of it, made after the records were listed."""
        return layout.sync(sync) not in self.listed[layout.SYNCS] and self.store.exists(layout.sync(sync))

    def _place_now(self, shard: Shard, gone: Place | None) -> Place | None:
        """Where a shard lies that is not where it was: it is compacted, perhaps again, while it is looked for."""
        known = self.compactions.place(shard)
        now = self.compactions.place_now(shard, known) if known in (None, gone) else known
        return None if now == gone else now

    def _object(self, compaction: Compaction) -> pq.ParquetFile:
        if self.opened is None or self.opened[0] != compaction:
            self.opened = compaction, self._open(compaction)
        return self.opened[1]

    def _open(self, compaction: Compaction) -> pq.ParquetFile:
        data = self.store.read(compaction.object)
        if hashlib.sha256(data).hexdigest() != compaction.sha256 or len(data) != compaction.bytes:
            raise Damaged(f"{compaction.object} has not the content that its record promises (sha256 differs)")
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        if (file.metadata.metadata or {}).get(b"run") != self.run.writer_of(compaction.object).encode():
            raise Damaged(f"{compaction.object} is another run's")
        if file.num_row_groups != compaction.parts[-1].end_group:
            wanted = compaction.parts[-1].end_group
            raise Damaged(f"{compaction.object} has {file.num_row_groups} row groups, its record says {wanted}")
        return file

    def _compacted(self, place: Place, record: SyncRecord) -> pa.Table:
        part, key = place.part, place.part.shard.key
        try:
            file = self._object(place.compaction)
        except Missing:
            if (now := self._place_now(part.shard, place)) is None:
                raise
            return self._compacted(now, record)
        table = file.read_row_groups(list(part.groups), use_threads=False)
        if len(table) != part.shard.rows:
            raise Damaged(f"{key} has {len(table)} rows in it, its record says {part.shard.rows}")
        facts = {"seq": part.shard.seq, "sync": part.sync, "step": part.step}
        if odd := [name for name, value in facts.items() if set(table[name].to_pylist()) != {value}]:
            raise Damaged(f"{key}: column {odd[0]!r} is not {facts[odd[0]]} throughout")
        table = with_later(table)
        check_compacted(table, key, given_up=part.given_up)
        if part.given_up and not self._is_inherited(key):  # else the parent answers for it
            if (part.sync, part.step) != (record.sync, record.step):
                raise Damaged(f"{key} was admitted by record {record.sync}, not {part.sync}")
            if not self._gives_up(part):
                raise Damaged(f"{key}: {part.given_up} rows lack their tokens, which no retention record gives up")
        return table

    def _gives_up(self, part: Part) -> bool:
        """Whether a retention record does, be it a new one."""
        if not any(it.payloads.first_sync <= part.sync <= it.payloads.last_sync for it in self.payloads):
            self.payloads = given_up_payloads(self.run)
        return any(it.payloads.first_sync <= part.sync <= it.payloads.last_sync for it in self.payloads)

    def _is_inherited(self, key: str) -> bool:
        return self.run.inherits is not None and self.run.inherits.inherits(key)

    def twice(
        self,
        compactions: Sequence[Compaction],
        found: Mapping[tuple[str, str], Place],
        admitted: Mapping[str, tuple[Shard, SyncRecord]],
    ) -> None:
        """What a compaction that was killed, or is at work, has left: it is removed by the next."""
        listed = set(self.listed[layout.TRAJECTORIES])
        doubled = [shard.key for shard, _ in admitted.values() if (shard.key, shard.sha256) in found]
        if doubled := [key for key in doubled if key in listed and not self._is_inherited(key)]:
            self.note(f"{len(doubled)} shards lie in a compaction and are not removed yet: {doubled[0]} and the like")
        counting = {place.compaction.object for place in found.values()}
        stray = {key for key in self.listed[layout.COMPACTIONS] if not is_record(key)} - counting
        stray.update(it.object for it in compactions if it.object not in counting)
        for key in sorted(stray):
            if not self._is_inherited(key):
                self.note(f"{key} is unfinished, or another has taken its place")

    def waiting(self, sync_records: Sequence[SyncRecord]) -> None:
        """Shards that no record speaks of, and those that one has refused."""
        refused = {refusal.key: refusal.reason for record in sync_records for refusal in record.refused}
        spoken_of = {shard.key for record in sync_records for shard in record.shards} | refused.keys()
        for key, reason in refused.items():
            self.note(f"{key} was refused: {reason}")
        shards = rows = 0
        for key in self.listed[layout.TRAJECTORIES]:
            if key not in spoken_of:
                with self.looking_at(key):
                    if (data := self._waiting(key)) is None:
                        continue
                    table = read_shard(self.run.writer_of(key), key, data)
                    self.relations.add_trajectories(table, sync=None, step=None)
                    shards, rows = shards + 1, rows + len(table)
        if shards:
            self.note(f"{shards} shards with {rows} trajectories have arrived since the last sync")

    def _waiting(self, key: str) -> bytes | None:
        """None of one that has been admitted and compacted meanwhile."""
        try:
            return self.reading.read(key)
        except Missing:
            self.compactions.look()
            if key not in self.compactions.shards():
                raise
            return None

    # --- the ledger -------------------------------------------------------------------------------------------------

    def ledger(self, spans: Sequence[Span], sync_records: Sequence[SyncRecord], *, reached: int) -> None:
        """The ledger of the chain has no gap up to the newest sync that it, a version or a checkpoint has reached."""
        steps, draws = (
            {name for key in self.listed[folder] if (name := layout.parse_ledger(key))}
            for folder in (layout.STEPS, layout.DRAWS)
        )
        names = steps & draws
        standing = {name for name in names if accepts(spans, name)}
        newest = max((name.number for name in standing), default=0)
        upto = max(newest, reached)
        expected = {Version(sync, span.attempt) for sync in range(1, upto + 1) for span in spans if span.covers(sync)}
        self.ledger_objects(steps, draws, expected, self.ledger_records(expected, reached=reached))
        if halves := (steps ^ draws) - expected:
            self.note(
                f"syncs of which half the ledger is stored, by a trainer that was killed or is at it: {len(halves)}"
            )
        self.ledger_steps(expected, {record.sync: record.step for record in sync_records})
        if names - standing:
            self.note(f"syncs in the ledger that a later attempt took again after a crash: {len(names - standing)}")
        newest_record = max((record.sync for record in sync_records), default=0)
        if newest_record > upto:
            self.note(f"the steps up to record {newest_record} are not in the ledger yet, those up to {newest} are")

    def ledger_records(self, expected: set[Version], *, reached: int) -> dict[Version, LedgerRecord]:
        """Return the record of each sync's draws and steps, and note the records that are missing."""
        found: dict[Version, LedgerRecord] = {}
        for key in self.listed[layout.LEDGER]:
            with self.looking_at(key):
                record = LedgerRecord.decode(self.records.read(key), key)
                if key != layout.ledger(record.sync, record.attempt):
                    self.wrong(key, f"says it is of sync {record.sync} of attempt {record.attempt}")
                if it := record.previous:
                    self.records.link(key, layout.ledger(it.sync, it.attempt), it.sha256)
                found[Version(record.sync, record.attempt)] = record
        self.count("ledger records", len(found))
        unverified = [name for name in expected if layout.ledger(*name) not in self.listed[layout.LEDGER]]
        for name in sorted(unverified, key=lambda it: it.order):
            if name.number <= reached and self.run.owner_of(layout.ledger(*name)).digests:
                self.wrong(layout.ledger(*name), "is missing, but a version or a checkpoint has gone past it")
        old = [name for name in unverified if not self.run.owner_of(layout.ledger(*name)).digests]
        if old:
            self.note(f"the ledger of {len(old)} syncs has no digests and is not verified")
        return found

    def ledger_objects(
        self,
        steps: set[Version],
        draws: set[Version],
        expected: set[Version],
        ledger_records: Mapping[Version, LedgerRecord],
    ) -> None:
        """Each by itself; those that are expected also with the others."""
        described = expected | ledger_records.keys()
        for name in sorted(steps | draws | described, key=lambda name: name.order):
            if name in draws | described:
                with self.looking_at(key := layout.draws(*name)):
                    data = self.reading.read(key)
                    if record := ledger_records.get(name):
                        record.draws.verify(data, key)
                    table = parquet.decode(data, key, DRAWS_SCHEMA, later=LATER)
                    self.count("ledger objects")
                    if name in expected:
                        self.relations.add_draws(table, key=key, sync=name.number)
            if name in steps | described:
                with self.looking_at(key := layout.steps(*name)):
                    data = self.reading.read(key)
                    if record := ledger_records.get(name):
                        record.steps.verify(data, key)
                    table = tables.decode_steps(data, key)
                    _check_names(table, sync=name.number, attempt=name.attempt)
                    digest = self.weights.get(name)
                    if digest and {*table["weights_sha256"].drop_null().to_pylist()} - {digest}:
                        self.wrong(layout.version(name), f"says that its weights are others than {key} says")
                    self.count("ledger objects")
                    if name in expected:
                        self.relations.add_steps(table, key=key, sync=name.number)
        self.count("steps", self.relations.count("steps"))
        self.count("draws", self.relations.count("drawn"))

    def ledger_steps(self, expected: set[Version], step_of: dict[int, int]) -> None:
        """Which steps each sync of the chain must have."""
        for name in sorted(expected):
            key = layout.sync(name.number)
            if key not in self.listed[layout.SYNCS]:
                self.wrong(key, "is missing, but the ledger has gone past it")
            elif name.number in step_of and name.number - 1 in step_of:
                steps = range(step_of[name.number - 1] + 1, step_of[name.number] + 1)
                keys = {"steps_key": layout.steps(*name), "draws_key": layout.draws(*name)}
                if steps:
                    self.relations.add_sync(name.number, steps, **keys)

    # --- folders and prompts ----------------------------------------------------------------------------------------

    def folders(self, prefix: str, removed: GivenUp) -> list[Version]:
        """Versions or checkpoints that are complete; the files of each against its manifest."""
        gone = removed.versions if prefix == layout.VERSIONS else removed.checkpoints
        kind = prefix.rstrip("/")
        names = {found[0] for key in self.listed[prefix] if (found := layout.parse_folder(key))}
        kept: list[Version] = []
        for version in sorted(names):
            folder = f"{prefix}{version}/"
            if f"{folder}{layout.MANIFEST}" not in self.listed[prefix]:
                self.note(f"{folder} {'is being removed' if version in gone else 'is unfinished: it has no manifest'}")
                continue
            kept.append(version)
            with self.looking_at(folder):
                self._folder(folder, prefix, version)
        self.count(kind, len(kept))
        return kept

    def _folder(self, folder: str, prefix: str, version: Version) -> None:
        try:
            manifest = self.records.decode(folder + layout.MANIFEST, "files", "sha256", "attempt")
            for file in manifest["files"]:
                _check_name(folder, file["name"])
            if prefix == layout.VERSIONS:
                fitting([tables.version_row(version, manifest)], tables.VERSIONS)
                self.weights[version] = manifest.get("weights_sha256")
            else:
                fitting([tables.checkpoint_row(version, manifest)], tables.CHECKPOINTS)
                checkpoint_files.check_manifest(self.run, version)
            number = manifest["version"] if prefix == layout.VERSIONS else manifest["sync"]
            if (number, manifest["attempt"]) != version:
                raise Damaged(f"its manifest says it is {Version(number, manifest['attempt'])}")
            if self.store.local_path(folder.rstrip("/")) is not None and "difference" not in manifest:
                manifest_folders.local_copy(self.store, folder)
            else:
                with scratch_folder() as scratch:
                    manifest_folders.fetch(self.store, folder, scratch)
        except (Missing, Damaged):
            if not self.store.exists(folder + layout.MANIFEST) and self._is_given_up(version, prefix):
                self.note(f"{folder} is being removed")
                return
            raise

    def _is_given_up(self, version: Version, prefix: str) -> bool:
        """By now. It may be kept all the same, for a fork: only its manifest tells."""
        now = given_up(self.run)
        return version in (now.versions if prefix == layout.VERSIONS else now.checkpoints)

    def prompts_records(self) -> dict[str, Digest]:
        """Return the digest of each split that has a record."""
        found: dict[str, Digest] = {}
        for key in self.listed[layout.PROMPTS]:
            if layout.parse_prompts(key) is None:
                with self.looking_at(key):
                    record = self.records.decode(key, "split", "bytes", "sha256")
                    if key != layout.prompts_record(record["split"]):
                        self.wrong(key, f"says it is of split {record['split']!r}")
                    if layout.prompts(record["split"]) not in self.listed[layout.PROMPTS]:
                        self.wrong_too(layout.prompts(record["split"]), f"is missing, but {key} names it")
                    found[record["split"]] = Digest.decode(record)
        lacking = [
            key for key in self.listed[layout.PROMPTS] if (split := layout.parse_prompts(key)) and split not in found
        ]
        for key in lacking:
            record_key = layout.prompts_record(layout.parse_prompts(key) or "")
            if record_key in self.listed[layout.PROMPTS]:
                continue  # what is wrong with it has been said
            if self.run.owner_of(key).digests and self.listed[layout.SYNCS]:
                self.wrong(record_key, "is missing")
            else:
                self.note(f"{key} has no digest and is not verified")
        return found

    def prompts(self) -> None:
        """What was asked: of every trajectory, and of every evaluation."""
        for prefix, split in ((layout.TRAJECTORIES, "train"), (layout.EVALUATIONS, "test")):
            key = layout.prompts(split)
            if self.listed[prefix] and key not in self.listed[layout.PROMPTS]:
                self.wrong(key, f"is missing, but there are {prefix.rstrip('/')}")
        digests = self.prompts_records()
        for key in self.listed[layout.PROMPTS]:
            if (split := layout.parse_prompts(key)) is None:
                continue
            with self.looking_at(key):
                data = self.reading.read(key)
                if split in digests:
                    digests[split].verify(data, key)
                found = parquet.decode(data, key, PROMPTS_SCHEMA)
                doubled = len(found) - len(set(found["prompt_id"].to_pylist()))
                if doubled:
                    self.wrong(key, f"has {doubled} prompt ids twice")
                if key == layout.prompts("train"):
                    self.relations.add_prompts(found, key=key)
                self.count("prompts", len(found))


def _is_read_whole(entry: Entry) -> bool:
    """True unless an object is read in another way: the files of versions and checkpoints, and compactions."""
    is_file = layout.parse_folder(entry.key) and not entry.key.endswith(f"/{layout.MANIFEST}")
    return not is_file and (layout.parse_compaction(entry.key) is None or is_record(entry.key))


def _whole(keys: Sequence[str]) -> list[str]:
    """Of manifest folders, one key each."""
    manifests = [key for key in keys if key.endswith(f"/{layout.MANIFEST}")]
    return manifests or list(keys)


def _check_name(folder: str, name: str) -> None:
    try:
        check_key(folder + name)
    except StorageError as error:
        raise Damaged(f"its manifest names {error}") from None


def _check_names(table: pa.Table, **wanted: int) -> None:
    """A ledger object is what its name says it is."""
    for column, value in wanted.items():
        if set(table[column].to_pylist()) - {value}:
            raise Damaged(f"has rows of another {column} than its name says")
