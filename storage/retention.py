"""What has been given up on purpose, and why: a record written before anything is removed."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from storage import folders, layout, records
from storage.folders import Found
from storage.run import Run
from tba.errors import AlreadyExists
from tba.types import Version


@dataclass(frozen=True, kw_only=True)
class GivenUp:
    versions: frozenset[Version]
    checkpoints: frozenset[Version]


def give_up(run: Run, *, why: str, versions: Iterable[Version] = (), checkpoints: Iterable[Version] = ()) -> int:
    """Write the record that allows these to be removed; returns its number."""
    removed = {"versions": [str(v) for v in versions], "checkpoints": [str(c) for c in checkpoints]}
    number = len(run.store.list(layout.RETENTION))
    while True:
        number += 1
        record = {"retention": number, "removed": removed, "why": why, "created_at": records.now()}
        try:
            run.store.create(layout.retention(number), records.encode(record))
        except AlreadyExists:
            continue
        return number


def keep_only(run: Run, prefix: str, found: Found, kept: Collection[Version], *, why: str) -> list[Version]:
    """Of the versions, or checkpoints, that were found, give up and remove all others, and sweep up what interrupted
    writes and removals have left behind. Returns what was given up."""
    removed = [it for it in found.complete if it not in kept]
    _remove(run, prefix, removed, why)
    left = folders.left_behind(run.store, prefix, found)
    appeared = [it for it in left if not folders.sweep(run.store, f"{prefix}{it}/")]
    _remove(run, prefix, appeared, "written by a superseded trainer while it was swept up")
    return [*removed, *appeared]


def _remove(run: Run, prefix: str, names: Sequence[Version], why: str) -> None:
    if names:
        give_up(run, **{prefix.rstrip("/"): names}, why=why)
    for name in names:
        folders.remove(run.store, f"{prefix}{name}/")


def given_up(run: Run) -> GivenUp:
    """Everything that any record gives up."""
    with records.reading(f"{run.url}/{layout.RETENTION}"):
        removed = [record["removed"] for record in records.read_all(run.store, layout.RETENTION, "removed")]
        return GivenUp(
            versions=frozenset(Version.parse(name) for names in removed for name in names["versions"]),
            checkpoints=frozenset(Version.parse(name) for names in removed for name in names["checkpoints"]),
        )
