"""Checks the records of a run's forks, which pruning must understand, and of a fork, that its parent has one of it."""

from contextlib import suppress

from storage import layout
from storage.maintenance.check.context import CheckContext
from storage.objects import manifest_folders, records
from storage.runs.inheritance import Parent
from storage.runs.retention import given_up
from storage.runs.run import Run
from tba.errors import Damaged, Missing
from tba.types import Version


def check_forks(context: CheckContext) -> None:
    run, findings, forks = context.run, context.findings, context.listed[layout.FORKS]
    for key in forks:
        with findings.looking_at(key), suppress(Missing):  # the record of a fork that was given up before it was made
            origin = Parent.decode(context.records.decode(key, "fork"), key)
            if origin.run != run.name:
                findings.report(key, f"says that it leaves run {origin.run!r}")
    if forks:
        findings.count("forks", len(forks))
    if run.older:
        with findings.looking_at(layout.RUN):
            origins = _registered_origins(run, run.older)
            if not origins:
                raise Damaged(f"its parent has no record of it in {layout.FORKS}: nothing keeps what it needs")
            if run.parent not in origins:
                raise Damaged(f"its parent's record of it in {layout.FORKS} says that it leaves it elsewhere")


def versions_of_parent(run: Run) -> list[Version]:
    """Return the versions that trajectories of a fork may cite beyond those that it shares with its parent: a fork that
    replays draws on what the parent recorded later."""
    if run.older is None:
        return []
    return [*manifest_folders.complete(run.older.store, layout.VERSIONS), *given_up(run.older).versions]


def _registered_origins(run: Run, parent: Run) -> list[Parent]:
    """Return where the fork leaves its parent, as the parent's records say. The parent's check answers for records that
    cannot be read."""
    found: list[Parent] = []
    for key in (entry.key for entry in parent.own.list(layout.FORKS) if layout.is_part(entry.key)):
        with suppress(Missing, Damaged):
            record = records.read(parent.own, key, "fork")
            if record["fork"] == run.name:
                found.append(Parent.decode(record, key))
    return found
