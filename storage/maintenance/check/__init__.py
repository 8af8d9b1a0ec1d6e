"""Checks the objects of a run. Finds which of them are damaged, missing, stored twice, or contradict other objects.

A check reads the store itself, never a copy of it, and changes nothing. The run may be live: work in progress (shards
that no sync record admits yet, a ledger that is being written, uploads without a manifest) is noted but is not a
problem.

Each module checks one kind of object. `check` runs them in such an order that each gets what it needs from the earlier
ones, and itself notes objects that are not part of a run.
"""

from collections.abc import Iterable, Sequence

from storage import layout
from storage.maintenance.check.attempts import check_attempts, check_continued
from storage.maintenance.check.context import CheckContext
from storage.maintenance.check.findings import Findings, Problem
from storage.maintenance.check.forks import check_forks, versions_of_parent
from storage.maintenance.check.ledger import check_ledger
from storage.maintenance.check.prompts import check_prompts
from storage.maintenance.check.retention import check_retention
from storage.maintenance.check.roles import check_roles
from storage.maintenance.check.shards import check_shards
from storage.maintenance.check.sync_records import check_sync_records
from storage.maintenance.check.weights import check_checkpoints, check_evaluations, check_versions
from storage.queries.mirror import Progress
from storage.runs.attempts import Span, stands
from storage.runs.run import Run
from tba.types import Version

__all__ = ["Findings", "Problem", "check"]

_SHOWN = 20  # number of objects outside the run that notes name; the others are only counted


def check(run: Run, *, progress: Progress | None = None) -> Findings:
    """Check the objects of a run, and return the problems and notes. `progress` is called with the number of objects
    checked so far and the number of all objects."""
    context = CheckContext.of(run, progress or (lambda done, total: None))
    attempts, spans = check_attempts(context)
    sync_records = check_sync_records(context)
    removed, payloads = check_retention(context)
    check_shards(context, sync_records, lost=removed.shards, payloads=payloads)
    weights = check_versions(context, removed)
    checkpoints = check_checkpoints(context, removed)
    published = {*weights, *removed.versions}
    evaluated = check_evaluations(context, published)
    check_continued(context, attempts, {*checkpoints, *removed.checkpoints})
    reached = _newest_sync(run, spans, checkpoints, [*weights, *evaluated])
    check_ledger(context, spans, sync_records, weights, reached=reached)
    check_prompts(context)
    check_forks(context)
    check_roles(context)
    _check_other_objects(context)
    context.relations.add_published({*published, *versions_of_parent(run)})
    _report_across_objects(context)
    return context.findings.finish()


def _newest_sync(run: Run, spans: Sequence[Span], checkpoints: Iterable[Version], versions: Iterable[Version]) -> int:
    """Return the newest sync on the chain of attempts whose ledger must be stored, because a checkpoint or a version is
    stored after it. In synchronous runs (`sync.lag` is 0), a version is stored before the ledger of its sync."""
    ahead = int(run.config.get("sync", {}).get("lag") == 0)
    reached = [
        *(name.number for name in checkpoints if stands(spans, name)),
        *(name.number - ahead for name in versions if stands(spans, name)),
    ]
    return max(reached, default=0)


def _check_other_objects(context: CheckContext) -> None:
    """Note unfinished writes, and objects that are not part of a run. Report names of the run at which something lies
    that is not a file."""
    store, findings = context.run.store, context.findings
    if left := store.unfinished():
        findings.note(f"{len(left)} writes are under way or were never finished, the first is of {left[0]}")
    strangers = list(context.strangers)
    for key in store.irregular():
        if layout.is_part(key):
            findings.report(key, "is no regular file: nothing can be stored or read under this name until it is moved")
        else:
            strangers.append(key)
    for key in strangers[:_SHOWN]:
        findings.note(f"{key} is not part of a run")
    if len(strangers) > _SHOWN:
        findings.note(f"{len(strangers) - _SHOWN} more objects are not part of a run")


def _report_across_objects(context: CheckContext) -> None:
    """Report the problems that show only after all objects have been read, and note records without a digest."""
    findings, records = context.findings, context.records
    for key, problem in context.relations.problems():
        findings.report(key, problem)
    for key, problem in records.problems():
        findings.report_unless_known(key, problem)
    if unverified := records.unverified:
        findings.note(f"{len(unverified)} records have no digest and are not verified, the first is {unverified[0]}")
