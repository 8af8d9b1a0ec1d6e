"""The tree of forks in a report: the ancestors of a run, what each fork changed, and the forks of the run."""

from typing import Any

from markupsafe import Markup

from flows.pages.rendering import render
from flows.pages.report.settings import comparable_settings
from storage.runs import forks
from storage.runs.run import Run


def section(run: Run) -> Markup:
    """Return the section of the report; empty text for a run that is not a fork and has no forks."""
    line = [run]
    while older := line[0].older:
        line.insert(0, older)
    children = forks.names(run)
    if len(line) == 1 and not children:
        return Markup()
    told = [{"name": it.name, "is_here": it is run, "fork": _fork(it)} for it in line]
    return render("report/lineage.html", line=told, forks=children)


def _fork(run: Run) -> dict[str, Any] | None:
    if run.parent is None or run.older is None:
        return None
    before, after = comparable_settings(run.older), comparable_settings(run)
    changes = [
        f"{name} {before.get(name, '–')} → {after.get(name, '–')}"
        for name in sorted({**before, **after})
        if before.get(name) != after.get(name)
    ]
    replays = run.parent.replays is not None
    return {"step": run.parent.step, "parent": run.parent.run, "replays": replays, "changes": changes}
