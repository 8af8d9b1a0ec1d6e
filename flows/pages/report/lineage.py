"""The report's tree of forks: what a run comes from, what each step down changed, and what was forked from it."""

from html import escape

from flows.pages.html import heading
from storage.queries.tables import by_name
from storage.runs import forks
from storage.runs.run import Run


def section(run: Run) -> str:
    """Empty text of a run that neither is a fork nor has any."""
    line = [run]
    while older := line[0].older:
        line.insert(0, older)
    children = forks.names(run)
    if len(line) == 1 and not children:
        return ""
    tree = "".join(f"<li>{escape(name)}, a fork of this run</li>" for name in children)
    for it in reversed(line):
        inside = f"<ul class='tree'>{tree}</ul>" if tree else ""
        here = " class='here'" if it is run else ""
        tree = f"<li{here}><b>{escape(it.name)}</b>{_changed(it)}{inside}</li>"
    return f"{heading('Lineage')}<ul class='tree'>{tree}</ul>"


def _changed(run: Run) -> str:
    if run.parent is None or run.older is None:
        return ""
    before, after = dict(by_name(run.older)), dict(by_name(run))
    changes = [
        f"{name} {before.get(name, '–')} → {after.get(name, '–')}"
        for name in sorted({**before, **after})
        if before.get(name) != after.get(name)
    ]
    how = ", replays its records" if run.parent.replays is not None else ""
    told = "; ".join(changes) or "with the same settings"
    return f", from step {run.parent.step:,} of {escape(run.parent.run)}{how}: <code>{escape(told)}</code>"
