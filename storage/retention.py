"""What has been given up on purpose, and why: a record written before anything is removed."""

from collections.abc import Callable, Collection, Iterable, Sequence
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
    number = len(run.own.list(layout.RETENTION))
    while True:
        number += 1
        record = {"retention": number, "removed": removed, "why": why, "created_at": records.now()}
        try:
            run.store.create(layout.retention(number), records.encode(record))
        except AlreadyExists:
            continue
        return number


def keep_only(
    run: Run, prefix: str, found: Found, kept: Callable[[], Collection[Version]], *, why: str
) -> list[Version]:
    """Of the versions, or checkpoints, that were found, give up and remove all others, and sweep up what interrupted
    writes and removals have left behind. Returns what was removed.

    `kept` is asked again once the record is written: whoever comes to need one registers first, and then looks for
    such records, so that one of the two sees the other."""
    removed = _remove(run, prefix, [it for it in found.complete if it not in kept()], kept, why)
    left = folders.left_behind(run.own, prefix, found)
    appeared = [it for it in left if not folders.sweep(run.own, f"{prefix}{it}/")]
    return removed + _remove(run, prefix, appeared, kept, "written by a superseded trainer while it was swept up")


def _remove(
    run: Run, prefix: str, names: Sequence[Version], kept: Callable[[], Collection[Version]], why: str
) -> list[Version]:
    if not names:
        return []
    give_up(run, **{prefix.rstrip("/"): names}, why=why)
    removed = [name for name in names if name not in kept()]
    for name in removed:
        folders.remove(run.own, f"{prefix}{name}/")
    return removed


def given_up(run: Run) -> GivenUp:
    """Everything that any record gives up."""
    with records.reading(f"{run.url}/{layout.RETENTION}"):
        removed = [record["removed"] for record in records.read_all(run.store, layout.RETENTION, "removed")]
        return GivenUp(
            versions=frozenset(Version.parse(name) for names in removed for name in names["versions"]),
            checkpoints=frozenset(Version.parse(name) for names in removed for name in names["checkpoints"]),
        )
