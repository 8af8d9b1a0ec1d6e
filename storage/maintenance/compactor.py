"""Compaction: the rows of many admitted shards move into one object; if asked to, payloads are given up on the way.

The object comes first, then its record, then the shards are removed. Nothing is removed unless a compaction of higher
rank holds it whole, so it does no harm to be killed anywhere, or to be two at once: whoever comes next goes on with
what it finds, and removes what is there twice.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage import layout
from storage.buffer.index import Index
from storage.buffer.settings import NoDraws
from storage.log.compactions import COLUMNS, FACTS, PAYLOAD, Compaction, Compactions, Part, Place, encode, understood
from storage.log.schema import COLUMNS as INDEXED
from storage.log.schema import ENCODING, TRAJECTORY_SCHEMA, UNREADABLE, with_later
from storage.log.schema import decode as decode_shard
from storage.log.shard_reader import SIDE_BY_SIDE, ShardReader
from storage.log.syncs import Shard, SyncRecord, read_chain
from storage.objects import manifest_folders, records
from storage.runs import forks, retention
from storage.runs.attempts import accepts, chain
from storage.runs.retention import GivenUpPayloads
from storage.runs.run import Run
from tba.errors import AlreadyExists, Damaged, Missing
from tba.types import Eligibility, Version

Progress = Callable[[int, int], None]
"""Told how many of how many shards are done."""

SHARDS, BYTES = 256, 64 << 20
"""What an object holds at most."""

_ROWS = 1024  # of a row group: a shard has few, since each costs time in every query
_WORTH = 0.25  # of a compaction's payloads: the least for which it is written anew
_COMPUTED = ("version_step", "age")  # columns of the view of trajectories
_TAKEN = {name.lower() for name in (*COLUMNS.names, *_COMPUTED)}
_OPTIONS = {name: value for name, value in ENCODING.items() if name != "row_group_size"}
_STATISTICS = [*FACTS, *_OPTIONS["write_statistics"]]


@dataclass
class Compacted:
    """What a compaction has done."""

    run: str
    upto: Version | None  # the checkpoint whose record is the last that was looked at; None if there is none
    shards: int = 0  # that lie in compactions now
    written: list[str] = field(default_factory=list)  # objects
    removed: int = 0  # objects
    bytes_written: int = 0
    payloads_given_up: int = 0  # of how many rows
    retention: int | None = None  # the record that says so
    forks: list[str] = field(default_factory=list)  # that may draw what no step of the run can
    left: dict[str, str] = field(default_factory=dict)  # shards that stay as they are, and why


def compact(
    run: Run,
    *,
    keep_checkpoints: int,
    drop_beyond: Eligibility | None = None,
    progress: Progress | None = None,
) -> Compacted:
    """Of what was admitted up to the oldest of the newest `keep_checkpoints`. With `drop_beyond`, which is the rule of
    the run's index, rows that it cannot draw from then on lose their payloads, unless a fork may draw them."""
    return _Compaction(run, keep_checkpoints, drop_beyond, progress or (lambda done, total: None)).everything()


class _Admitted(NamedTuple):
    shard: Shard
    sync: int
    step: int


class _Compaction:
    def __init__(self, run: Run, keep: int, drop_beyond: Eligibility | None, progress: Progress):
        self.run, self.store, self.progress = run, run.store, progress
        self.drop_beyond = drop_beyond
        self.compactions = Compactions(run)
        lost = retention.given_up(run).shards
        self.synced = [record.without(lost) for record in read_chain(run)]
        self.checkpoint = _oldest_checkpoint(run, keep)
        self.outcome = Compacted(run.name, self.checkpoint)
        self.drawable: dict[str, np.ndarray] = {}  # by key of the shards that may lose payloads: which rows may not
        self.payloads: GivenUpPayloads | None = None
        self.whole: set[str] = set()  # objects that have been read and found whole
        self.last_read: tuple[Compaction, pq.ParquetFile] | None = None

    def everything(self) -> Compacted:
        self.adopt()
        self.compactions.look()
        chosen = self.chosen()
        if chosen and self.drop_beyond:
            self.choose_payloads(self.drop_beyond)
        groups = [group for group in self.groups(chosen) if self.is_worth_it(group)]
        self.give_up(groups)
        for done, group in enumerate(groups):
            self.progress(done, len(groups))
            self.write(group)
        self.remove()
        return self.outcome

    # --- what there is to do ----------------------------------------------------------------------------------------

    def adopt(self) -> None:
        """Objects that lack their record, since whoever made them was killed: it may also be that one who lives is just
        about to write it. Either way the object counts from then on as any other."""
        found = {entry.key for entry in self.run.own.list(layout.COMPACTIONS)}
        admitted = {shard.key: shard.sha256 for record in self.synced for shard in record.shards}
        for key in sorted(found):
            name = layout.parse_compaction(key)
            if name is None or key != name.object or name.record in found or self.store.exists(name.record):
                continue
            with suppress(Missing, Damaged):
                compaction = _described(self.store.read(key), key)
                if all(admitted.get(part.shard.key) == part.shard.sha256 for part in compaction.parts):
                    self.record(compaction)

    def chosen(self) -> list[_Admitted]:
        """The run's own shards that a compaction may take in."""
        if self.checkpoint is None:
            return []
        found = [
            _Admitted(shard, record.sync, record.step)
            for record in self.synced
            if record.sync <= self.checkpoint.number
            for shard in record.shards
        ]
        shared = self.run.inherits
        return [it for it in found if not (shared and shared.inherits(it.shard.key))]

    def groups(self, chosen: Sequence[_Admitted]) -> Iterator[list[_Admitted]]:
        """Of one object each, in the order of the records. A compaction that is large enough stays as it is, unless
        enough of its payloads can be given up."""
        again = {it.object: self.is_made_again(it) for it in self.compactions.look()}
        group: list[_Admitted] = []
        size = 0
        for it in chosen:
            place = self.compactions.place(it.shard)
            stays = place is not None and not again.get(place.compaction.object, True)
            if group and (stays or len(group) == SHARDS or size + it.shard.bytes > BYTES):
                yield group
                group, size = [], 0
            if not stays:
                group.append(it)
                size += it.shard.bytes
        if group:
            yield group

    def is_made_again(self, compaction: Compaction) -> bool:
        small = len(compaction.parts) < SHARDS // 2 and compaction.bytes < BYTES // 2
        return small or self.gives_up_enough([part.shard for part in compaction.parts])

    def is_worth_it(self, group: Sequence[_Admitted]) -> bool:
        """Not, if it would make one compaction out of the same."""
        places = [self.compactions.place(it.shard) for it in group]
        sources = {place.compaction.object for place in places if place}
        return None in places or len(sources) > 1 or self.gives_up_enough([it.shard for it in group])

    # --- payloads ---------------------------------------------------------------------------------------------------

    def choose_payloads(self, eligibility: Eligibility) -> None:
        """Which rows no step after the checkpoint can draw: the index says so, as it is then. Damaged if nobody could
        go on from there, and steps would have to be taken from further back again."""
        if self.checkpoint:
            manifest_folders.check_sizes(self.run.own, layout.checkpoint(self.checkpoint))
        self.outcome.forks = forks.names(self.run)
        last = [record for record in self.synced if self.checkpoint and record.sync <= self.checkpoint.number]
        first = 1 + max(forks.newest_pinned_record(self.run), self.run.parent.sync if self.run.parent else -1)
        if first > last[-1].sync:
            return
        index, named = _index(self.run, last, eligibility)
        for record in last:
            for shard in record.shards if record.sync >= first else ():
                places = index.shards[named[shard.key]]
                rows = index.pool.rows.take(np.arange(places.start, places.stop), ["drawable"])
                self.drawable[shard.key] = rows["drawable"].astype(bool)
        self.payloads = GivenUpPayloads(
            columns=PAYLOAD,
            first_sync=first,
            last_sync=last[-1].sync,
            step=last[-1].step,
            eligibility=eligibility,
        )

    def to_give_up(self, shard: Shard) -> int:
        """How many rows of a shard have a payload that nobody needs."""
        drawable_B = self.drawable.get(shard.key)
        place = self.compactions.place(shard)
        known = place.part.given_up if place else 0
        return 0 if drawable_B is None else max(0, int((~drawable_B).sum()) - known)

    def gives_up_enough(self, shards: Sequence[Shard]) -> bool:
        places = [self.compactions.place(shard) for shard in shards]
        left = sum(shard.rows - (it.part.given_up if it else 0) for shard, it in zip(shards, places, strict=True))
        number = sum(map(self.to_give_up, shards))
        return number > 0 and number >= _WORTH * left

    def give_up(self, groups: Sequence[Sequence[_Admitted]]) -> None:
        """Say so before it is done, and then look at the forks again: whoever makes one registers it and then looks
        for what has been given up, so that one of the two sees the other."""
        if self.payloads is None or not any(self.to_give_up(it.shard) for group in groups for it in group):
            self.drawable = {}
            return
        said = [it for it in retention.given_up_payloads(self.run) if it.payloads == self.payloads]
        why = f"payloads that no step after {self.payloads.step} can draw"
        self.outcome.retention = (
            said[0].number if said else retention.give_up(self.run, why=why, payloads=self.payloads)
        )
        pinned = forks.newest_pinned_record(self.run)
        for group in groups:
            for it in group:
                if it.sync <= pinned:
                    self.drawable.pop(it.shard.key, None)

    # --- writing ----------------------------------------------------------------------------------------------------

    def write(self, group: Sequence[_Admitted]) -> None:
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            loose = dict(zip(group, pool.map(self.read_loose, group), strict=True))
        sources, taken, tables = [], [], []
        for it in group:
            place = self.compactions.place(it.shard)
            table = self.read_compacted(it.shard, place) if place else loose[it]
            if table is not None and self.fits(it.shard, table, tables):
                sources += [place.compaction] if place else []
                taken.append(it)
                tables.append(table)
        same = len({it.object for it in sources}) == 1 and len(sources) == len(taken)
        if taken and not (same and not any(self.to_give_up(it.shard) for it in taken)):
            self.store_object(*self.encoded(taken, tables, sources))

    def read_loose(self, it: _Admitted) -> pa.Table | None:
        """A shard that is an object of its own; None, and why, if it is not as its record says."""
        if self.compactions.place(it.shard):
            return None
        try:
            data = self.store.read(it.shard.key)
            if sha256(data).hexdigest() != it.shard.sha256:
                raise Damaged("it is not what the record that admits it found: its sha256 differs")
            return decode_shard(data)
        except Missing:
            if self.compactions.place_now(it.shard, None) is None:
                self.outcome.left[it.shard.key] = "it is missing"
        except (Damaged, *UNREADABLE) as error:
            self.outcome.left[it.shard.key] = str(error).splitlines()[0]
        return None

    def read_compacted(self, shard: Shard, place: Place) -> pa.Table | None:
        """None, and why, if the compaction is damaged, or another that is at work has just removed it."""
        try:
            return self.read_part(place.compaction, place.part)
        except (Missing, Damaged, *UNREADABLE) as error:
            self.outcome.left[shard.key] = str(error).splitlines()[0]
            return None

    def read_part(self, compaction: Compaction, part: Part) -> pa.Table:
        if self.last_read is None or self.last_read[0] != compaction:
            self.last_read = compaction, pq.ParquetFile(pa.BufferReader(self.read_whole(compaction)))
        table = self.last_read[1].read_row_groups(list(part.groups), use_threads=False)
        return with_later(table.drop_columns(list(FACTS)))

    def read_whole(self, compaction: Compaction) -> bytes:
        data = self.store.read(compaction.object)
        if sha256(data).hexdigest() != compaction.sha256:
            raise Damaged(f"{self.run.url}/{compaction.object} is not what its record says: its sha256 differs")
        self.whole.add(compaction.object)
        return data

    def fits(self, shard: Shard, table: pa.Table, others: Sequence[pa.Table]) -> bool:
        """Whether columns that a task has added can lie beside those of the other shards."""
        added = [name for name in table.column_names if name not in TRAJECTORY_SCHEMA.names]
        if taken := [name for name in added if name.lower() in _TAKEN]:
            self.outcome.left[shard.key] = f"it has a column {taken[0]!r} of its own"
            return False
        known = {other.schema.field(name) for other in others for name in added if name in other.column_names}
        if odd := [name for name in added if any(it.name == name and it != table.schema.field(name) for it in known)]:
            self.outcome.left[shard.key] = f"its column {odd[0]!r} is of another type than in other shards"
            return False
        return True

    def encoded(
        self, taken: Sequence[_Admitted], tables: Sequence[pa.Table], sources: Sequence[Compaction]
    ) -> tuple[Compaction, bytes]:
        tables = [self.without_payloads(it.shard, table) for it, table in zip(taken, tables, strict=True)]
        lost = [table["response_tokens"].null_count for table in tables]
        ends = np.cumsum([-(-it.shard.rows // _ROWS) for it in taken]).tolist()
        numbers = {number for source in sources for number in source.retention}
        if self.outcome.retention and any(it.shard.key in self.drawable for it in taken):
            numbers.add(self.outcome.retention)
        compaction = Compaction(
            object="",
            bytes=0,
            sha256="",
            generation=1 + max((source.generation for source in sources), default=0),
            retention=tuple(sorted(numbers)),
            parts=tuple(
                Part(shard=it.shard, sync=it.sync, step=it.step, first_group=first, end_group=end, given_up=given_up)
                for it, (first, end), given_up in zip(taken, pairwise([0, *ends]), lost, strict=True)
            ),
            created_at="",
        )
        data = _bytes(self.run.name, compaction, tables)
        before = sum(place.part.given_up for it in taken if (place := self.compactions.place(it.shard)))
        self.outcome.payloads_given_up += sum(lost) - before
        return _named(compaction, data), data

    def without_payloads(self, shard: Shard, table: pa.Table) -> pa.Table:
        drawable_B = self.drawable.get(shard.key)
        if drawable_B is None or drawable_B.all():
            return table
        rows = pa.array(np.arange(len(table)), mask=~drawable_B)
        for name in PAYLOAD:
            column = table[name].combine_chunks().take(rows)
            table = table.set_column(table.column_names.index(name), table.schema.field(name), column)
        return table

    def store_object(self, compaction: Compaction, data: bytes) -> None:
        with suppress(AlreadyExists):  # somebody was at the same; what it holds is seen before anything is removed
            self.store.create(compaction.object, data)
        self.record(compaction)
        self.outcome.written.append(compaction.object)
        self.outcome.bytes_written += len(data)

    def record(self, compaction: Compaction) -> None:
        with suppress(AlreadyExists):
            self.store.create(compaction.record, encode(compaction))

    # --- removing ---------------------------------------------------------------------------------------------------

    def remove(self) -> None:
        """What lies in a compaction of higher rank, which is read whole before."""
        stored = {entry.key for entry in self.run.own.list(layout.TRAJECTORIES)}
        found = self.compactions.look()
        shared = self.run.inherits
        own = [it for it in found if not (shared and shared.inherits(it.object))]
        holders = {it.object: self.holders(it) for it in own}
        for compaction in own:
            mine = [part.shard.key for part, holder in holders[compaction.object] if holder == compaction]
            self.outcome.shards += len(mine)
            self.remove_all([key for key in mine if key in stored], [compaction])
        for compaction in own:
            others = {holder.object: holder for _, holder in holders[compaction.object]}
            if compaction.object not in others:
                self.remove_all([compaction.record], list(others.values()))
                self.remove_all([compaction.object], list(others.values()))

    def holders(self, compaction: Compaction) -> list[tuple[Part, Compaction]]:
        """For each of its shards the compaction that counts."""
        places = [(part, self.compactions.place(part.shard)) for part in compaction.parts]
        return [(part, place.compaction) for part, place in places if place]

    def remove_all(self, keys: Sequence[str], held_by: Sequence[Compaction]) -> None:
        if not keys:
            return
        for compaction in held_by:
            try:
                if compaction.object not in self.whole:
                    self.read_whole(compaction)
            except (Missing, Damaged) as error:
                self.outcome.left.update(dict.fromkeys(keys, str(error).splitlines()[0]))
                return
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            list(pool.map(self.store.delete, keys))
        self.outcome.removed += len(keys)


def _oldest_checkpoint(run: Run, keep: int) -> Version | None:
    """Of those that the run keeps for itself, not for its forks. A fork has some of its own later."""
    spans, shared = chain(run), run.parent.sync if run.parent else 0
    own = [
        it for it in manifest_folders.complete(run.own, layout.CHECKPOINTS) if accepts(spans, it) and it.number > shared
    ]
    return own[-keep:][0] if own else None


def _index(run: Run, synced: Sequence[SyncRecord], eligibility: Eligibility) -> tuple[Index, Mapping[str, str]]:
    """After these records, and the names by which it knows shards. Nothing is drawn from it."""
    steps = {record.sync: record.step for record in synced}
    undrawn = NoDraws(eligibility)
    index = Index(
        run.sampler_sql,
        seed=0,
        sampling=undrawn,
        training=undrawn,
        step_of_version=lambda version: steps[version.number],
    )
    reader = ShardReader(run, disk_bytes=0)
    named = {shard.key: f"{shard.searcher}/{shard.seq}" for record in synced for shard in record.shards}
    for record in synced:
        ordered = sorted(record.shards, key=lambda shard: (shard.searcher, shard.seq))
        light = [(named[shard.key], table) for shard, table in reader.light(ordered, INDEXED)]
        index.extend(record.sync, light, step=record.step)
    return index, named


def _bytes(run: str, compaction: Compaction, tables: Sequence[pa.Table]) -> bytes:
    """The object; it also says what its record will."""
    added = pa.unify_schemas([table.schema.remove_metadata() for table in tables])
    fields = [*COLUMNS, *(field for field in added if field.name not in TRAJECTORY_SCHEMA.names)]
    schema = pa.schema(fields, {"run": run, "compaction": encode(compaction)})
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, schema, **{**_OPTIONS, "write_statistics": _STATISTICS}) as writer:
        for part, table in zip(compaction.parts, tables, strict=True):
            facts = {"seq": part.shard.seq, "sync": part.sync, "step": part.step}
            columns = [_column(field, table, facts) for field in schema]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema), row_group_size=_ROWS)
    return sink.getvalue().to_pybytes()


def _column(field: pa.Field, table: pa.Table, facts: Mapping[str, int]) -> pa.Array | pa.ChunkedArray:
    if field.name in facts:
        return pa.array(np.full(len(table), facts[field.name], np.int32))
    return table[field.name] if field.name in table.column_names else pa.nulls(len(table), field.type)


def _named(compaction: Compaction, data: bytes) -> Compaction:
    syncs, digest = [part.sync for part in compaction.parts], sha256(data).hexdigest()
    name = layout.compaction(min(syncs), max(syncs), digest)
    return replace(compaction, object=name.object, bytes=len(data), sha256=digest, created_at=records.now())


def _described(data: bytes, key: str) -> Compaction:
    """What an object says of itself; Damaged if it is none."""
    try:
        footer = pq.read_metadata(pa.BufferReader(data))
    except UNREADABLE as error:
        raise Damaged(f"{key} is no compaction: {str(error).splitlines()[0]}") from None
    said = (footer.metadata or {}).get(b"compaction", b"{}")
    named = _named(understood(records.decode(said, key), key), data)
    if named.object != key:
        raise Damaged(f"{key} is not what its name says")
    return named
