"""Compactions: objects that hold the rows of many admitted shards. The shards are removed once the record of the
compaction is stored.

In the object, each shard has row groups of its own. A shard can be in several compactions, for example if a compaction
was compacted again, or if two were made at the same time. Then every reader uses the compaction of the highest rank.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from threading import Lock
from typing import Any, NamedTuple

import pyarrow as pa

from storage import layout
from storage.log.schema import LATER, TRAJECTORY_SCHEMA
from storage.log.sync_records import Shard
from storage.objects import records
from storage.objects.store import Store
from storage.runs.run import Run
from tba.errors import Damaged, Missing

PAYLOAD = ("prompt_tokens", "response_tokens", "behaviour_logps", "ref_logps")
"""Columns that become null when a retention record gives up the payload of a row. Only rows that no gradient step will
draw again lose their payload."""
FACTS = {name: pa.int32() for name in ("seq", "sync", "step")}
"""Columns that a compaction adds to each row: the seq of the row's shard, and the sync and step of the sync record that
admitted the shard."""

_HEAVY = ("prompt", "response", *PAYLOAD, *LATER)
COLUMNS = pa.schema(
    [
        *(pa.field(name, kind) for name, kind in FACTS.items()),
        *(field for field in TRAJECTORY_SCHEMA if field.name not in _HEAVY),
        *(TRAJECTORY_SCHEMA.field(name) for name in _HEAVY),
    ]
)
"""The columns of every compaction, in this order. The columns from which the replay buffer's index is made are
neighbours, so they are read in one piece per row group."""

_FIELDS = ("object", "bytes", "sha256", "generation", "retention", "parts", "created_at")
_PART = ("sync", "step", "first_group", "end_group", "given_up")


@dataclass(frozen=True, kw_only=True)
class Part:
    """The rows of one shard in a compaction: its row groups from `first_group` to the one before `end_group`."""

    shard: Shard
    sync: int  # the sync that admitted the shard, in the run that made the compaction
    step: int  # the gradient step that this sync follows
    first_group: int
    end_group: int
    given_up: int  # number of rows that have lost their payload

    @property
    def groups(self) -> range:
        return range(self.first_group, self.end_group)

    def encode(self) -> dict[str, Any]:
        return {**asdict(self.shard), **{name: getattr(self, name) for name in _PART}}

    @classmethod
    def decode(cls, record: Mapping[str, Any]) -> "Part":
        shard = records.known(Shard, record)
        return records.known(cls, {name: record[name] for name in _PART}, shard=shard)


@dataclass(frozen=True, kw_only=True)
class Compaction:
    object: str
    bytes: int
    sha256: str
    generation: int  # 1 more than the highest generation of the compactions that this one replaces
    retention: tuple[int, ...]  # numbers of the retention records that gave up payloads of its rows
    parts: tuple[Part, ...]  # in the order of the sync records
    created_at: str

    @property
    def record(self) -> str:
        name = layout.parse_compaction(self.object)
        if name is None:
            raise ValueError(f"{self.object!r} is not the name of a compaction")
        return name.record

    @property
    def rank(self) -> tuple[int, int, str]:
        return (self.generation, len(self.parts), self.object)


def encode(compaction: Compaction) -> bytes:
    fields = {name: getattr(compaction, name) for name in _FIELDS}
    return records.encode({**fields, "parts": [part.encode() for part in compaction.parts]})


def decode(data: bytes, name: str) -> Compaction:
    """Return the compaction that a record describes. Raise Damaged if `data` is not the compaction record with this
    name."""
    compaction = understood(records.decode(data, name, *_FIELDS), name)
    with records.reading(name):
        if not name.endswith(compaction.record):
            raise Damaged(f"{name} is the record of another compaction, {compaction.object}")
    return compaction


def understood(fields: Mapping[str, Any], name: str) -> Compaction:
    with records.reading(name):
        parts = tuple(Part.decode(part) for part in fields["parts"])
        lists = {"parts": parts, "retention": tuple(fields["retention"])}
        compaction = records.known(Compaction, {field: fields[field] for field in _FIELDS}, **lists)
        ends = [0, *(part.end_group for part in parts)]
        if [part.first_group for part in parts] != ends[:-1] or not all(part.groups for part in parts):
            raise Damaged(f"{name}: the row groups of its shards have gaps, or a shard has no row group")
    return compaction


class Place(NamedTuple):
    """The compaction from which the rows of a shard are read, and the shard's part of it."""

    compaction: Compaction
    part: Part


class Compactions:
    """The compactions of a run, and the places of their shards, as of the last look at the store. Each record is read
    once, because it never changes. Safe to use from several threads."""

    def __init__(self, run: Run):
        self.run, self.store = run, run.store
        self._known: dict[str, Compaction] = {}  # by key of the record
        self._places: dict[tuple[str, str], Place] = {}
        self._shards: dict[str, Shard] | None = None
        self._looking = Lock()

    def look(self) -> list[Compaction]:
        """Look at the store, and return all compactions that have a record. Raise Damaged if a record is damaged."""
        with self._looking:
            return self._look()

    def place(self, shard: Shard) -> Place | None:
        """Return the place of a shard in a compaction. None if the shard is an object of its own, or was compacted only
        after the last look."""
        return self._places.get((shard.key, shard.sha256))

    def place_now(self, shard: Shard, known: Place | None) -> Place | None:
        """Return the current place of a shard that was not found at the place `known`. Look at the store again first,
        unless another thread has just found a new place."""
        with self._looking:
            if self.place(shard) == known:
                self._look()
        return self.place(shard)

    def shards(self) -> dict[str, Shard]:
        """Return the compacted shards of this run by key. A compaction that a fork inherits from its parent can also
        hold shards that the fork does not inherit; those are left out."""
        if self._shards is None:
            shared = self.run.inherits.inherits if self.run.inherits else lambda key: False
            shards = [(shared(place.compaction.object), place.part.shard) for place in self._places.values()]
            self._shards = {shard.key: shard for inherited, shard in shards if inherited == shared(shard.key)}
        return self._shards

    def _look(self) -> list[Compaction]:
        keys = [entry.key for entry in self.store.list(layout.COMPACTIONS) if is_record(entry.key)]
        new = [key for key in keys if key not in self._known]
        known = {key: self._known[key] for key in keys if key in self._known}
        for key, data in zip(new, _read(self.store, new), strict=True):
            if data is not None:
                known[key] = decode(data, f"{self.store.url}/{key}")
        if known.keys() != self._known.keys():
            self._known, self._places, self._shards = known, places(known.values()), None
        return list(known.values())


def is_record(key: str) -> bool:
    name = layout.parse_compaction(key)
    return name is not None and key == name.record


def places(compactions: Iterable[Compaction]) -> dict[tuple[str, str], Place]:
    """Return the place of each compacted shard, by the shard's key and sha256. If several compactions hold a shard, the
    place is in the one of the highest rank."""
    by_shard: dict[tuple[str, str], Place] = {}
    for compaction in sorted(compactions, key=lambda compaction: compaction.rank):
        for part in compaction.parts:
            by_shard[part.shard.key, part.shard.sha256] = Place(compaction, part)
    return by_shard


def _read(store: Store, keys: list[str]) -> list[bytes | None]:
    """Return the bytes of these objects; None for an object that was removed after it was listed."""
    try:
        return list(store.read_many(keys))
    except Missing:
        return [_read_one(store, key) for key in keys]


def _read_one(store: Store, key: str) -> bytes | None:
    try:
        return store.read(key)
    except Missing:
        return None
