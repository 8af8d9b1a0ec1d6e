"""The store of a fork. It shows the fork's own objects and those of its parent up to the fork's start; a replay also
shows later shards of the parent.

Whether an object is inherited follows from its name and the parent's records, not from which of the two stores holds
it. So an object that the parent wrote later, under a name that the fork uses too, is not part of the fork. All writes
go to the fork's own store; the parent is never changed.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from storage import layout
from storage.objects import records
from storage.objects.damage import LookingAt, raising
from storage.objects.records import read_each
from storage.objects.store import Entry, Store
from tba.errors import AlreadyExists, Damaged, StorageError


@dataclass(frozen=True, kw_only=True)
class Parent:
    """The run that a fork starts from, and the place in that run. The fork's `run.json` holds this."""

    run: str  # the parent's name; the parent lies in the same folder as the fork
    step: int  # the last gradient step that both runs share
    sync: int  # the sync that follows this step: the last sync that both runs share
    attempt: int  # the parent's attempt that wrote the ledger up to this sync
    attempts: int  # the parent's newest attempt when the fork was made; attempts of the fork have higher numbers
    replays: int | None  # in a replay: the parent's newest sync record that the fork draws on
    rebuilt: bool  # whether the fork stores the checkpoint it starts from, because the parent no longer had it

    @property
    def newest_record(self) -> int:
        """The number of the newest sync record of the parent that the fork uses."""
        return self.sync if self.replays is None else self.replays

    def encode(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def decode(cls, record: Any, name: str) -> Self:
        with records.reading(name):
            parent = cls(**{field: record[field] for field in cls.__dataclass_fields__})
        if not layout.is_run_name(parent.run):
            raise Damaged(f"{name}: parent.run is not the name of a run: {parent.run!r:.120}")
        if parent.replays is not None and parent.replays < parent.sync:
            raise Damaged(f"{name}: a fork from sync {parent.sync} cannot replay up to sync {parent.replays}")
        return parent


class ForkedStore:
    """The `Store` of a fork. `parent` is the store of its parent, which may be a fork itself."""

    def __init__(self, own: Store, parent: Store, origin: Parent, looking_at: LookingAt | None = None):
        self.own, self.parent, self.origin = own, parent, origin
        self.url = own.url
        self._looking_at = looking_at or raising(parent.url)

    def __str__(self) -> str:
        return str(self.own)

    def for_reading(self, looking_at: LookingAt) -> "ForkedStore":
        """Return the same store for readers that continue if a sync record of an ancestor is damaged. It does not show
        the shards that the damaged record admits. Never write through it: it does not know the names of those
        shards."""
        parent = self.parent.for_reading(looking_at) if isinstance(self.parent, ForkedStore) else self.parent
        return ForkedStore(self.own, parent, self.origin, looking_at)

    @property
    def replays(self) -> bool:
        """True if the fork trains on the trajectories that its parent recorded, and has no searchers of its own."""
        return self.origin.replays is not None

    def inherits(self, key: str) -> bool:
        """True if the fork inherits the object of this name from its parent."""
        origin = self.origin
        if key.startswith(layout.TRAJECTORIES):
            return key in self.inherited_shards
        if key.startswith(layout.PROMPTS):
            return True
        if compaction := layout.parse_compaction(key):  # it may also hold later shards
            return compaction.first_sync <= self.origin.newest_record
        if (sync := layout.parse_sync(key)) is not None:
            return sync <= origin.sync
        if (attempt := layout.parse_attempt(key) or layout.parse_arithmetic(key)) is not None:
            return attempt <= origin.attempts
        name = layout.parse_ledger(key) or layout.parse_evaluation(key)
        if folder := layout.parse_folder(key):
            name = folder[0]
        if name is None or name.attempt > origin.attempts:
            return False
        newest = origin.sync - (origin.rebuilt and key.startswith(layout.CHECKPOINTS))
        return name.number <= newest

    @cached_property
    def inherited_shards(self) -> frozenset[str]:
        """The keys of the shards that the sync records up to the fork's start admit or refuse. In a replay, also the
        keys of the shards that the parent's later sync records admit, up to the newest record that the fork uses."""
        keys = [layout.sync(sync) for sync in range(self.origin.newest_record + 1)]
        shards: set[str] = set()
        for sync, (key, read) in enumerate(read_each(self.parent, keys)):
            with self._looking_at(key):
                record = records.decode(read(), f"{self.parent.url}/{key}", "shards", "refused")
                names = {shard["key"] for shard in record["shards"]}
                if sync <= self.origin.sync:  # shared by both runs: a refused name is never admitted later
                    names |= {refusal["key"] for refusal in record["refused"]}
                shards |= names
        return frozenset(shards)

    @cached_property
    def _newest_inherited(self) -> dict[str, str]:
        """For each searcher's folder, the key of the last shard that the fork inherits."""
        newest: dict[str, str] = {}
        for key in self.inherited_shards:
            folder = key.split("/")[1]
            newest[folder] = max(key, newest.get(folder, ""))
        return newest

    # --- reading ----------------------------------------------------------------------------------------------------

    def read(self, key: str) -> bytes:
        return self._of(key).read(key)

    def read_many(self, keys: Sequence[str]) -> Sequence[bytes]:
        inherited = {key for key in keys if self.inherits(key)}
        from_parent = iter(self.parent.read_many([key for key in keys if key in inherited]))
        from_own = iter(self.own.read_many([key for key in keys if key not in inherited]))
        return [next(from_parent if key in inherited else from_own) for key in keys]

    def read_range(self, key: str, start: int, length: int) -> bytes:
        return self._of(key).read_range(key, start, length)

    def exists(self, key: str) -> bool:
        return self._of(key).exists(key)

    def list(self, prefix: str = "", *, after: str = "") -> list[Entry]:
        entries = [entry for entry in self.own.list(prefix, after=after) if not self.inherits(entry.key)]
        if not prefix or (prefix.startswith(layout.SHARED) and self._shares(prefix, after)):
            entries += [entry for entry in self.parent.list(prefix, after=after) if self.inherits(entry.key)]
        return sorted(entries)

    def _shares(self, prefix: str, after: str) -> bool:
        """True if a listing has to include the parent's objects. The parent is listed only if necessary, because it may
        have stored many objects after the fork's start."""
        if not prefix.startswith(layout.TRAJECTORIES):
            return True
        folders = {f"{layout.TRAJECTORIES}{name}/": newest for name, newest in self._newest_inherited.items()}
        return any(
            newest > after
            for folder, newest in folders.items()
            if folder.startswith(prefix) or prefix.startswith(folder)
        )

    def folders(self, prefix: str = "") -> Sequence[str]:
        names = set(self.own.folders(prefix))
        if prefix == layout.TRAJECTORIES:
            names.update(self._newest_inherited)
        return sorted(names)

    def download(self, key: str, path: Path) -> None:
        self._of(key).download(key, path)

    def read_tagged(self, key: str) -> tuple[bytes, str] | None:
        return self._of(key).read_tagged(key)

    def local_path(self, key: str) -> Path | None:
        whole_folder = layout.parse_folder(f"{key}/{layout.MANIFEST}")
        return self._of(f"{key}/{layout.MANIFEST}" if whole_folder else key).local_path(key)

    # --- writing ----------------------------------------------------------------------------------------------------

    def create(self, key: str, data: bytes) -> None:
        if self.inherits(key):
            raise AlreadyExists(f"{self.url}/{key} is inherited from {self.parent.url}")
        self.own.create(key, data)

    def upload(self, path: Path, key: str, *, may_link: bool = False) -> None:
        self._refuse_inherited(key)
        self.own.upload(path, key, may_link=may_link)

    def delete(self, key: str) -> None:
        self._refuse_inherited(key)
        self.own.delete(key)

    def replace(self, key: str, data: bytes, *, tag: str | None) -> str:
        self._refuse_inherited(key)
        return self.own.replace(key, data, tag=tag)

    def unfinished(self, prefix: str = "") -> Sequence[str]:
        return self.own.unfinished(prefix)

    def discard(self, key: str) -> None:
        self.own.discard(key)

    def discard_older(self, prefix: str, seconds: float) -> Sequence[str]:
        return self.own.discard_older(prefix, seconds)

    def irregular(self, prefix: str = "") -> Sequence[str]:
        return [key for key in self.own.irregular(prefix) if not self.inherits(key)]

    def _of(self, key: str) -> Store:
        return self.parent if self.inherits(key) else self.own

    def _refuse_inherited(self, key: str) -> None:
        if self.inherits(key):
            raise StorageError(f"{self.url}/{key} is inherited from {self.parent.url} and cannot be changed here")
