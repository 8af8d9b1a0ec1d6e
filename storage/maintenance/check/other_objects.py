"""Notes objects that are not part of a run, which somebody else has stored, and unfinished writes."""

from storage import layout
from storage.maintenance.check.context import CheckContext

_SHOWN = 20  # number of objects that notes name; the others are only counted


def check_other_objects(context: CheckContext) -> None:
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
