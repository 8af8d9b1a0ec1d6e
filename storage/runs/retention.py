"""Retention records: which versions, checkpoints, shards and payloads have been given up on purpose, and why. A record
is written before anything is removed."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from storage import layout
from storage.objects import manifest_folders, records
from storage.objects.damage import LookingAt, raising
from storage.objects.manifest_folders import VersionFolders
from storage.runs.run import Run
from tba.errors import AlreadyExists, Damaged, Missing
from tba.types import Eligibility, Version

_FIRST_RULE = {"evict": "oldest", "copies": "newest", "max_age": None}


@dataclass(frozen=True, kw_only=True)
class GivenUp:
    versions: frozenset[Version]
    checkpoints: frozenset[Version]
    shards: frozenset[str] = frozenset()  # keys of admitted shards that were lost


@dataclass(frozen=True, kw_only=True)
class GivenUpShards:
    """Admitted shards that were lost and given up. The replay buffers of later attempts do not hold these shards. So if
    an earlier attempt took gradient steps while its buffer held them, these steps cannot be repeated."""

    keys: tuple[str, ...]
    first_sync: int  # the first sync that admitted any of them
    attempt: int  # the newest attempt when the shards were given up

    def were_there(self, sync: int, attempt: int) -> bool:
        """True if the replay buffer of this attempt held at least one of the shards after sync record `sync` was
        applied."""
        return attempt <= self.attempt and sync >= self.first_sync

    @classmethod
    def decode(cls, said: Mapping[str, Any]) -> Self:
        return records.known(cls, said, keys=tuple(said["keys"]))


@dataclass(frozen=True, kw_only=True)
class GivenUpPayloads:
    """Payloads that were given up: the values in `columns` of rows admitted by sync records `first_sync` to
    `last_sync`. Only the rows that an index with this eligibility rule cannot draw after record `last_sync` have lost
    them."""

    columns: tuple[str, ...]
    first_sync: int
    last_sync: int
    step: int  # the gradient step that sync `last_sync` follows; later steps can still be taken
    eligibility: Eligibility

    def lacks(self, start: int, newest: int) -> bool:
        """True if gradient steps that continue from sync `start`, and draw rows admitted up to sync record `newest`,
        may need these payloads."""
        return start < self.last_sync and newest >= self.first_sync

    def encode(self) -> dict[str, Any]:
        plain = asdict(self)
        return {**plain, **plain.pop("eligibility")}

    @classmethod
    def decode(cls, said: Mapping[str, Any]) -> Self:
        """Decode the payloads that a retention record gives up. An older record may lack a setting of the eligibility
        rule that did not exist yet; the setting then gets the value that all runs had."""
        names = {it.name for it in fields(Eligibility)}
        rule = {**_FIRST_RULE, **{name: value for name, value in said.items() if name in names}}
        others = {name: value for name, value in said.items() if name not in names}
        return cls(**{**others, "columns": tuple(said["columns"]), "eligibility": Eligibility(**rule)})


@dataclass(frozen=True)
class RetentionRecord:
    """A retention record that gives up payloads."""

    number: int
    payloads: GivenUpPayloads
    why: str
    created_at: str

    def __str__(self) -> str:
        return f"{layout.retention(self.number)} of {self.created_at[:16]}"


def give_up(
    run: Run,
    *,
    why: str,
    versions: Iterable[Version] = (),
    checkpoints: Iterable[Version] = (),
    payloads: GivenUpPayloads | None = None,
    shards: GivenUpShards | None = None,
) -> int:
    """Write a retention record: it says that these versions, checkpoints and payloads may be removed, and that these
    shards are lost. Return the number of the record."""
    removed: dict[str, Any] = {"versions": [str(v) for v in versions], "checkpoints": [str(c) for c in checkpoints]}
    if shards:
        removed["shards"] = asdict(shards)
    if payloads:
        removed["payloads"] = payloads.encode()
    number = max(_numbers(run), default=0)
    while True:
        number += 1
        record = {
            "retention": number,
            "removed": removed,
            "why": why,
            "previous_sha256": records.sha256_of(run.own, layout.retention(number - 1)) if number > 1 else None,
            "created_at": records.now(),
        }
        try:
            run.store.create(layout.retention(number), records.encode(record))
        except AlreadyExists:
            continue
        return number


def keep_only(
    run: Run, prefix: str, found: VersionFolders, kept: Callable[[], Collection[Version]], *, why: str
) -> list[Version]:
    """Give up and remove the versions or checkpoints in `found`, except those that `kept` returns. Also remove what
    interrupted writes and removals have left behind. Return the removed versions or checkpoints.

    `kept` is called again after the retention record is written. A process that begins to need a version first
    registers this need and then looks for retention records, so one of the two processes sees what the other wrote."""
    removed = _remove(run, prefix, [it for it in found.complete if it not in kept()], kept, why)
    left = manifest_folders.left_behind(run.own, prefix, found)
    appeared = [it for it in left if not manifest_folders.sweep(run.own, f"{prefix}{it}/")]
    return removed + _remove(run, prefix, appeared, kept, "written by a superseded trainer while it was swept up")


def _remove(
    run: Run, prefix: str, names: Sequence[Version], kept: Callable[[], Collection[Version]], why: str
) -> list[Version]:
    if not names:
        return []
    if prefix == layout.VERSIONS:
        give_up(run, versions=names, why=why)
    else:
        give_up(run, checkpoints=names, why=why)
    removed = [name for name in names if name not in kept()]
    for name in reversed(removed):  # a version is removed before its base
        manifest_folders.remove(run.own, f"{prefix}{name}/")
    return removed


def given_up(run: Run, looking_at: LookingAt | None = None) -> GivenUp:
    """Return the versions, checkpoints and shards that retention records have given up: those of the run itself and
    those that it inherits. `looking_at` decides what happens with a damaged record; by default Damaged is raised."""
    versions: set[Version] = set()
    checkpoints: set[Version] = set()
    shards: set[str] = set()
    if looking_at:
        _note_gaps(run, looking_at)
    for key, data in _stored(run):
        with (looking_at or raising(run.url))(key):
            record = records.decode(data, f"{run.url}/{key}", "retention", "removed")
            if layout.retention(record["retention"]) != key:
                raise Damaged(f"{key} is another record, number {record['retention']}")
            removed = [set(map(Version.parse, record["removed"][name])) for name in ("versions", "checkpoints")]
            versions |= removed[0]
            checkpoints |= removed[1]
            if said := record["removed"].get("shards"):
                shards.update(GivenUpShards.decode(said).keys)
    if run.older and (fork := run.inherits):  # the parent may give up an object whose name the fork uses for its own
        theirs = given_up(run.older, looking_at)
        versions |= {it for it in theirs.versions if fork.inherits(layout.version(it) + layout.MANIFEST)}
        checkpoints |= {it for it in theirs.checkpoints if fork.inherits(layout.checkpoint(it) + layout.MANIFEST)}
        shards |= set(filter(fork.inherits, theirs.shards))
    return GivenUp(versions=frozenset(versions), checkpoints=frozenset(checkpoints), shards=frozenset(shards))


def given_up_payloads(run: Run) -> list[RetentionRecord]:
    """Return the retention records that give up payloads: those of this run and, for a fork, those of its ancestors
    that concern syncs which the fork inherits."""
    with records.reading(f"{run.url}/{layout.RETENTION}"):
        found = [_of_payloads(it) for it in _own_records(run) if "payloads" in it["removed"]]
    if run.older and run.parent:
        found += [it for it in given_up_payloads(run.older) if it.payloads.first_sync <= run.parent.sync]
    return found


def lost_for(run: Run, sync: int, attempt: int) -> str | None:
    """Return the name of a retention record that gives up shards which the replay buffer of `attempt` held after sync
    record `sync` was applied. The gradient steps that follow this record cannot be repeated then. None if there is no
    such record."""
    for record in _own_records(run):
        name = layout.retention(record["retention"])
        with records.reading(f"{run.url}/{name}"):
            said = record["removed"].get("shards")
            if said and GivenUpShards.decode(said).were_there(sync, attempt):
                return name
    return lost_for(run.older, sync, attempt) if run.older and run.parent and sync <= run.parent.newest_record else None


def in_the_way(run: Run, start: int, newest: int) -> RetentionRecord | None:
    """Return a retention record which gave up payloads that gradient steps may need, if they continue from sync `start`
    and draw rows admitted up to sync record `newest`. Of several such records, return the one that reaches the latest
    sync. None if there is no such record."""
    found = [it for it in given_up_payloads(run) if it.payloads.lacks(start, newest)]
    return max(found, key=lambda it: it.payloads.last_sync, default=None)


def _own_records(run: Run) -> Iterator[Mapping[str, Any]]:
    """Yield the retention records of the run itself, without those of its parent."""
    for key, data in _stored(run):
        yield records.decode(data, f"{run.url}/{key}", "retention", "removed")


def _stored(run: Run) -> Iterator[tuple[str, bytes]]:
    keys = [layout.retention(number) for number in _numbers(run)]
    return zip(keys, run.own.read_many(keys), strict=True)


def _note_gaps(run: Run, looking_at: LookingAt) -> None:
    numbers = _numbers(run)
    for number in sorted({*range(1, max(numbers, default=0))} - {*numbers}):
        with looking_at(key := layout.retention(number)):
            raise Missing(f"{run.url}/{key} is missing, although a later record exists")


def _numbers(run: Run) -> list[int]:
    keys = [entry.key for entry in run.own.list(layout.RETENTION) if layout.is_part(entry.key)]
    found = sorted(int(key.removeprefix(layout.RETENTION).removesuffix(".json")) for key in keys)
    while run.own.exists(layout.retention(newest := max(found, default=0) + 1)):  # the listing may be behind
        found.append(newest)
    return found


def _of_payloads(record: Mapping[str, Any]) -> RetentionRecord:
    payloads = GivenUpPayloads.decode(record["removed"]["payloads"])
    return RetentionRecord(record["retention"], payloads, record["why"], record["created_at"])
