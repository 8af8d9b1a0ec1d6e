"""A parent's records of its forks. A fork is registered before it exists, and pruning keeps what registered forks need.

Each process that makes a fork stores a registration of its own before the fork's `run.json` can exist. Its key is the
first free one of `forks/<name>`, `forks/<name>@2` and so on. Only two processes remove a registration:

- the process that stored it, if that process did not create the run and never will;
- the process that created the run of that name, because no other process can create that run any more.

So every fork that exists is registered, even if several processes wanted its name and some of them were killed. The
registration of a killed process keeps objects that nobody needs, until a run of that name is created.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from storage import layout
from storage.objects import manifest_folders, records
from storage.objects.open_store import open_store
from storage.runs.inheritance import Parent
from storage.runs.retention import given_up, in_the_way
from storage.runs.run import Run
from tba.errors import AlreadyExists, Missing
from tba.types import Version


class _Registration(NamedTuple):
    key: str
    fork: str
    origin: Parent


def register(parent: Run, name: str, origin: Parent) -> str:
    """Register a fork, so that the parent keeps the checkpoint and the trajectories that the fork will need. Return the
    key of the registration. Raise Missing, and register nothing, if some of these objects have been given up or
    removed."""
    key = _create(parent, name, origin)
    checkpoint = _start_of(origin)
    # Pruning writes its retention record first and then looks for forks. A fork registers first and then looks for
    # retention records. So at least one of the two sees the other.
    if checkpoint and not is_kept(parent, checkpoint):
        unregister(parent, key)
        raise Missing(f"{parent.url}: checkpoint {checkpoint} has just been given up")
    if gone := in_the_way(parent, origin.sync, origin.newest_record):
        unregister(parent, key)
        raise Missing(f"{parent.url}: {gone} has given up tokens that a fork from step {origin.step} draws")
    return key


def unregister(parent: Run, key: str) -> None:
    """Remove the registration of a fork that was not created. Only the process that registered the fork calls this. If
    the fork may have been created, as after a write without an answer, the registration must stay."""
    parent.own.delete(key)


def settle(parent: Run, name: str, key: str) -> None:
    """Remove the registrations that other processes have made for a fork of this name. Only the process that created
    the fork calls this; `key` is its own registration."""
    for it in list(_registered(parent)):
        if it.fork == name and it.key != key:
            parent.own.delete(it.key)


def is_kept(run: Run, checkpoint: Version) -> bool:
    """True if a fork that is already registered can start from this checkpoint.

    If a retention record gives up the checkpoint, a process that has not seen this registration may be about to remove
    the checkpoint. But a checkpoint from which an existing fork starts is safe: that fork was registered before the
    retention record, or it could not have been created. So the process that wrote the record saw that fork and removed
    nothing."""
    if checkpoint in given_up(run).checkpoints and not _starts_a_fork(run, checkpoint):
        return False
    return manifest_folders.read_manifest(run.store, layout.checkpoint(checkpoint)) is not None


def pinned_checkpoints(run: Run) -> set[Version]:
    """Return the checkpoints from which registered forks start."""
    return {checkpoint for it in _registered(run) if (checkpoint := _start_of(it.origin))}


def newest_pinned_record(run: Run) -> int:
    """Return the number of the newest sync record from which a registered fork draws rows; -1 if no fork is
    registered."""
    return max((it.origin.newest_record for it in _registered(run)), default=-1)


def names(run: Run) -> list[str]:
    """Return the names of the registered forks."""
    return sorted({it.fork for it in _registered(run)})


def _create(parent: Run, name: str, origin: Parent) -> str:
    record = {"fork": name, **origin.encode(), "created_at": records.now()}
    key, number = layout.fork(name), 1
    while True:
        try:
            parent.own.create(key, records.encode(record))
        except AlreadyExists:
            number += 1
            key = layout.fork(f"{name}@{number}")  # the name of a run has no "@"
            continue
        return key


def _registered(run: Run) -> Iterator[_Registration]:
    for entry in run.own.list(layout.FORKS):
        if layout.is_part(entry.key):
            with suppress(Missing):  # the registration was removed after it was listed
                record = records.read(run.own, entry.key, "fork")
                yield _Registration(entry.key, record["fork"], Parent.decode(record, f"{run.url}/{entry.key}"))


def _start_of(origin: Parent) -> Version | None:
    """Return the checkpoint of the parent that a fork starts from. Return None if the fork starts at sync 0, or has
    stored that checkpoint itself."""
    return None if origin.rebuilt or not origin.sync else Version(origin.sync, origin.attempt)


def _starts_a_fork(run: Run, checkpoint: Version) -> bool:
    """True if an existing fork starts from this checkpoint: this run itself, or a registered fork."""
    if run.parent and _start_of(run.parent) == checkpoint:
        return True
    found = [it for it in _registered(run) if _start_of(it.origin) == checkpoint]
    return any(_parent_of(layout.run_url(run.root, it.fork)) == it.origin for it in found)


def _parent_of(url: str) -> Parent | None:
    """Return the parent that the run at `url` names; None if there is no such run or it is not a fork."""
    store = open_store(url)
    try:
        record = records.read(store, layout.RUN, "parent")
    except Missing:
        return None
    return Parent.decode(record["parent"], f"{store.url}/{layout.RUN}") if record["parent"] else None
