"""Forks, as their parent knows them: each is registered before it exists, and pruning honours it.

Whoever makes a fork has a registration to itself, from before its `run.json` can exist: the first of `forks/<name>`,
`forks/<name>@2` and so on that nobody has. It is removed by two only: by who made it, if its run was not made and never
will be, and by who has made the run of that name, which the others have lost for good. So a run that exists is
registered, whoever else wanted its name, and whenever any of them was killed. What one that was killed leaves behind
keeps something that nobody needs, until there is a run of that name.
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
    """Make sure that what a fork will start from and draw from stays; returns the key of the record that says so.
    Missing, and nothing is registered, if some of it has been given up."""
    key = _create(parent, name, origin)
    checkpoint = _start_of(origin)
    # Whoever prunes says so before it looks for forks. Here it is the other way round: one of the two sees the other.
    if checkpoint and not is_kept(parent, checkpoint):
        unregister(parent, key)
        raise Missing(f"{parent.url}: checkpoint {checkpoint} has just been given up")
    if gone := in_the_way(parent, origin.sync, origin.newest_record):
        unregister(parent, key)
        raise Missing(f"{parent.url}: {gone} has given up tokens that a fork from step {origin.step} draws")
    return key


def unregister(parent: Run, key: str) -> None:
    """By who has registered a fork that was not made. Where it may have been, as after a write that was not answered,
    the record stays."""
    parent.own.delete(key)


def settle(parent: Run, name: str, key: str) -> None:
    """By who has made the fork that `key` registers: remove what others have registered under its name."""
    for it in list(_registered(parent)):
        if it.fork == name and it.key != key:
            parent.own.delete(it.key)


def is_kept(run: Run, checkpoint: Version) -> bool:
    """Whether a fork that is registered by now can start from a checkpoint. One that a record gives up may be about to
    be removed, by who has not seen this fork, unless a fork that was made starts from it. For that one was registered
    before the record, or it would not have been made, and so who wrote the record has seen it and removed nothing."""
    if checkpoint in given_up(run).checkpoints and not _starts_a_fork(run, checkpoint):
        return False
    return manifest_folders.read_manifest(run.store, layout.checkpoint(checkpoint)) is not None


def pinned_checkpoints(run: Run) -> set[Version]:
    """Those that forks start from."""
    return {checkpoint for it in _registered(run) if (checkpoint := _start_of(it.origin))}


def newest_pinned_record(run: Run) -> int:
    """The last of those that forks draw from; -1 if none does."""
    return max((it.origin.newest_record for it in _registered(run)), default=-1)


def names(run: Run) -> list[str]:
    """Of those that are registered."""
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
            with suppress(Missing):  # taken back meanwhile
                record = records.read(run.own, entry.key, "fork")
                yield _Registration(entry.key, record["fork"], Parent.decode(record, f"{run.url}/{entry.key}"))


def _start_of(origin: Parent) -> Version | None:
    """The parent's checkpoint that a fork starts from, if it needs one."""
    return None if origin.rebuilt or not origin.sync else Version(origin.sync, origin.attempt)


def _starts_a_fork(run: Run, checkpoint: Version) -> bool:
    """One that has been made: the run itself, or one of those that it has registered."""
    if run.parent and _start_of(run.parent) == checkpoint:
        return True
    found = [it for it in _registered(run) if _start_of(it.origin) == checkpoint]
    return any(_parent_of(layout.run_url(run.root, it.fork)) == it.origin for it in found)


def _parent_of(url: str) -> Parent | None:
    """Of a run that may not exist."""
    store = open_store(url)
    try:
        record = records.read(store, layout.RUN, "parent")
    except Missing:
        return None
    return Parent.decode(record["parent"], f"{store.url}/{layout.RUN}") if record["parent"] else None
