"""Checks a run's records of its forks, which pruning has to read. For a fork, also checks that its parent has a record
of the fork."""

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
        with findings.looking_at(key), suppress(Missing):  # just removed: the fork was abandoned before it existed
            origin = Parent.decode(context.records.decode(key, "fork"), key)
            if origin.run != run.name:
                findings.report(key, f"is the record of a fork of another run, {origin.run!r}")
    if forks:
        findings.count("forks", len(forks))
    if run.older:
        with findings.looking_at(layout.RUN):
            origins = _registered_origins(run, run.older)
            if not origins:
                raise Damaged(
                    f"its parent has no record of this fork in {layout.FORKS}, so pruning may remove what it needs"
                )
            if run.parent not in origins:
                raise Damaged(f"its parent's record of this fork in {layout.FORKS} has another origin than run.json")


def versions_of_parent(run: Run) -> list[Version]:
    """Return all versions of a fork's parent, including those that the fork does not inherit. A replay admits
    trajectories that the parent recorded later, and these may cite such versions."""
    if run.older is None:
        return []
    return [*manifest_folders.complete(run.older.store, layout.VERSIONS), *given_up(run.older).versions]


def _registered_origins(run: Run, parent: Run) -> list[Parent]:
    """Return where the fork starts, according to each readable record that the parent has of this fork. The check of
    the parent reports records that cannot be read."""
    found: list[Parent] = []
    for key in (entry.key for entry in parent.own.list(layout.FORKS) if layout.is_part(entry.key)):
        with suppress(Missing, Damaged):
            record = records.read(parent.own, key, "fork")
            if record["fork"] == run.name:
                found.append(Parent.decode(record, key))
    return found
