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

from storage import folders, layout, records
from storage.inheritance import Parent
from storage.retention import given_up, in_the_way
from storage.run import Run
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
    if checkpoint and (checkpoint in given_up(parent).checkpoints or not _exists(parent, checkpoint)):
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


def pinned_checkpoints(run: Run) -> set[Version]:
    """Those that forks start from."""
    return {checkpoint for it in _registered(run) if (checkpoint := _start_of(it.origin))}


def newest_pinned_record(run: Run) -> int:
    """The last of those that forks draw from; -1 if none does."""
    return max((it.origin.newest_record for it in _registered(run)), default=-1)


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


def _exists(run: Run, checkpoint: Version) -> bool:
    return folders.read_manifest(run.store, layout.checkpoint(checkpoint)) is not None
