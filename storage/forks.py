"""Forks, as their parent knows them: each is registered before it exists, and pruning honours it."""

from storage import folders, layout, records
from storage.inheritance import Parent
from storage.retention import given_up, in_the_way
from storage.run import Run
from tba.errors import AlreadyExists, Missing
from tba.types import Version


def register(parent: Run, name: str, origin: Parent) -> None:
    """Make sure that what a fork will start from and draw from stays. AlreadyExists if there is one of this name;
    Missing, and nothing is registered, if some of it has been given up."""
    record = {"fork": name, **origin.encode(), "created_at": records.now()}
    try:
        parent.own.create(layout.fork(name), records.encode(record))
    except AlreadyExists:
        raise AlreadyExists(f"{parent.name!r} has a fork {name!r} already") from None
    checkpoint = _start_of(origin)
    # Whoever prunes says so before it looks for forks. Here it is the other way round: one of the two sees the other.
    if checkpoint and (checkpoint in given_up(parent).checkpoints or not _exists(parent, checkpoint)):
        unregister(parent, name)
        raise Missing(f"{parent.url}: checkpoint {checkpoint} has just been given up")
    if gone := in_the_way(parent, origin.sync, origin.newest_record):
        unregister(parent, name)
        raise Missing(f"{parent.url}: {gone} has given up tokens that a fork from step {origin.step} draws")


def unregister(parent: Run, name: str) -> None:
    """Of a fork that was never made."""
    parent.own.delete(layout.fork(name))


def pinned_checkpoints(run: Run) -> set[Version]:
    """Those that forks start from."""
    return {checkpoint for origin in _origins(run) if (checkpoint := _start_of(origin))}


def newest_pinned_record(run: Run) -> int:
    """The last of those that forks draw from; -1 if none does."""
    return max((origin.newest_record for origin in _origins(run)), default=-1)


def _origins(run: Run) -> list[Parent]:
    with records.reading(f"{run.url}/{layout.FORKS}"):
        found = records.read_all(run.own, layout.FORKS, "fork")
        return [Parent.decode(record, f"{run.url}/{layout.fork(record['fork'])}") for record in found]


def _start_of(origin: Parent) -> Version | None:
    """The parent's checkpoint that a fork starts from, if it needs one."""
    return None if origin.rebuilt or not origin.sync else Version(origin.sync, origin.attempt)


def _exists(run: Run, checkpoint: Version) -> bool:
    return folders.read_manifest(run.store, layout.checkpoint(checkpoint)) is not None
