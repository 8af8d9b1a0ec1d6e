"""Notes what is no part of a run: objects that somebody else has stored, and writes that were never finished."""

from storage import layout
from storage.maintenance.check.context import CheckContext

_SHOWN = 20  # names that do not belong to a run; the rest is counted


def check_other_objects(context: CheckContext) -> None:
    """Note such names, which nobody reads. Report names of the run at which something else than a file lies."""
    store, findings = context.run.store, context.findings
    if left := store.unfinished():
        findings.note(f"{len(left)} writes are under way or were never finished: of {left[0]} and the like")
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
