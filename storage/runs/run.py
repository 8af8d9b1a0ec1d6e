"""A run: its name, its settings and its store. All other parts of storage work on a run."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from storage import layout
from storage.objects import records
from storage.objects.damage import LookingAt
from storage.objects.open_store import open_store, probe
from storage.objects.store import Store
from storage.runs.inheritance import ForkedStore, Parent
from tba.errors import AlreadyExists, ConfigError, Damaged, Missing, StorageError

SCHEMA_VERSION = 1
_FIELDS = ("run", "created_at", "created_by", "code_version", "schema_version", "config", "sampler_sql", "parent")


@dataclass(frozen=True, eq=False)
class Run:
    """A run that `Run.create` has created or `Run.open` has opened. `config` has the settings as they are stored;
    `tba.config.parse` converts them to a `Config`. The store of a fork also shows the objects that the fork
    inherits."""

    name: str
    root: str
    url: str
    store: Store = field(repr=False)
    config: dict[str, Any] = field(repr=False)
    sampler_sql: str = field(repr=False)
    code_version: str
    created_at: str
    created_by: str  # the command, or the id of the flow run, that created the run
    parent: Parent | None  # where a fork starts; None if the run is not a fork
    digests: bool = False  # whether every record of the run was written with a digest
    inherits: ForkedStore | None = field(default=None, repr=False)  # the store of a fork; None for other runs
    older: "Run | None" = field(default=None, repr=False)  # the parent of a fork, opened

    @classmethod
    def create(
        cls,
        root: str,
        name: str,
        *,
        config: Mapping[str, Any],
        sampler_sql: str,
        code_version: str,
        created_by: str = "",
        parent: Parent | None = None,
    ) -> Self:
        """Create a run, after `probe` has checked the store. Raise AlreadyExists if the name is taken. A fork must be
        stored under the same root as its parent."""
        store = open_store(layout.run_url(root, name), deadline=_deadline(config))
        try:
            probe(store)
        except Missing as error:
            raise ConfigError(f"root: nothing can be stored under {root!r}: {error}") from None
        record = {
            "run": name,
            "created_at": records.now(),
            "created_by": created_by,
            "code_version": code_version,
            "schema_version": SCHEMA_VERSION,
            "config": dict(config),
            "sampler_sql": sampler_sql,
            "parent": parent.encode() if parent else None,
            "digests": True,
        }
        try:
            store.create(layout.RUN, records.encode(record))
        except AlreadyExists:
            raise AlreadyExists(
                f"run {name!r} exists already at {store.url}: resume it, or choose another name"
            ) from None
        return cls._of(store, record)

    @classmethod
    def open(cls, url: str, *, forks: tuple[str, ...] = ()) -> Self:
        """Open a stored run. `forks` has the URLs of the forks that are being opened and that descend from this run."""
        store = open_store(url.rstrip("/"))
        if store.url in forks:
            raise Damaged(f"{forks[0]}/{layout.RUN}: the parents of this run lead back to {store.url}")
        try:
            data = store.read(layout.RUN)
        except Missing:
            raise Missing(f"there is no run at {store.url}: it has no {layout.RUN}") from None
        name = f"{store.url}/{layout.RUN}"
        written = records.decode(data, name, "schema_version")["schema_version"]
        if written != SCHEMA_VERSION:  # checked before the fields, because another version may have other fields
            raise StorageError(
                f"{store.url} was written with schema version {written}, but this code reads only {SCHEMA_VERSION}"
            )
        record = records.decode(data, name, *_FIELDS)
        return cls._of(open_store(store.url, deadline=_deadline(record["config"])), record, forks)

    @classmethod
    def _of(cls, store: Store, record: Mapping[str, Any], forks: tuple[str, ...] = ()) -> Self:
        name = f"{store.url}/{layout.RUN}"
        if not layout.is_run_name(record["run"]):
            raise Damaged(f"{name}: run is not the name of a run: {record['run']!r:.120}")
        parent = Parent.decode(record["parent"], name) if record["parent"] else None
        older = _parent_beside(store, parent, forks) if parent else None
        forked = ForkedStore(store, older.store, parent) if parent and older else None
        return cls(
            name=record["run"],
            root=layout.root_of(store.url),
            url=store.url,
            store=forked or store,
            config=record["config"],
            sampler_sql=record["sampler_sql"],
            code_version=record["code_version"],
            created_at=record["created_at"],
            created_by=record["created_by"],
            parent=parent,
            digests=record.get("digests") is True,
            inherits=forked,
            older=older,
        )

    @property
    def own(self) -> Store:
        """The store of the run's own objects, without those that a fork inherits."""
        return self.inherits.own if self.inherits else self.store

    @property
    def folder(self) -> Path | None:
        """The folder of a run that is stored on a local disk; None for a remote run."""
        record = self.own.local_path(layout.RUN)
        return record.parent if record else None

    def for_reading(self, looking_at: LookingAt) -> "Run":
        """Return the same run for readers that continue if a sync record of an ancestor is damaged."""
        if self.inherits is None or self.store is not self.inherits:
            return self
        forked = self.inherits.for_reading(looking_at)
        older = self.older.for_reading(looking_at) if self.older else None
        return replace(self, store=forked, inherits=forked, older=older)

    @property
    def store_deadline(self) -> float:
        return _deadline(self.config)

    def writer_of(self, key: str) -> str:
        """Return the name of the run that an object belongs to: this run, or an ancestor from which the object is
        inherited."""
        return self.owner_of(key).name

    def owner_of(self, key: str) -> "Run":
        """Return the run that an object belongs to: this run, or an ancestor from which the object is inherited."""
        run: Run = self
        while run.older and run.inherits and run.inherits.inherits(key):
            run = run.older
        return run


def _parent_beside(store: Store, parent: Parent, forks: tuple[str, ...]) -> Run:
    url = f"{store.url.rpartition('/')[0]}/{parent.run}"
    try:
        return Run.open(url, forks=(*forks, store.url))
    except Missing:
        raise Missing(f"{store.url} is a fork of {parent.run!r}, which does not exist beside it: {url}") from None


def _deadline(config: Any) -> float:
    """Return the most seconds that one request to the store may take, according to the run's settings; 60 if they do
    not say."""
    try:
        return float(config["limits"]["store_deadline"])
    except (KeyError, TypeError, ValueError):
        return 60.0


def run_urls(root: str) -> list[str]:
    """Return the URL of every folder under a root that may contain a run."""
    store = open_store(root.rstrip("/"))
    return [f"{store.url}/{layout.RUNS}{name}" for name in store.folders(layout.RUNS)]


def default_root() -> str:
    """Return the root of runs if none is given: `$TBA_ROOT`, else `tba-runs` in the working directory."""
    return os.environ.get("TBA_ROOT") or "tba-runs"


def resolve(name_or_url: str) -> str:
    """Return the URL of a run that is given by URL, by path, or by its name under the default root."""
    if "/" in name_or_url:
        return name_or_url.rstrip("/")
    return layout.run_url(default_root(), name_or_url)
