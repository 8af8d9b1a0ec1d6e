"""Summarise runs: their state, step, version and score, read only from their storage.

`tba runs` lists these summaries. The web pages, `tba watch`, `tba resume` and `tba fork` use parts of them.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from flows.escaping import plain
from flows.progress import bar
from flows.queries.damage_report import in_words
from flows.supervision.interfaces import CLOSED, FAILED_WHY
from storage import layout
from storage.objects.damage import DamageLog
from storage.runs.attempts import Span, accepts, chain_as_readable, newest_attempt, stands
from storage.runs.control import State, read_state
from storage.runs.leases import Lease, read_leases
from storage.runs.run import Run, run_urls
from storage.weights.checkpoints import Checkpoints
from storage.weights.evaluations import Evaluations
from storage.weights.versions import Versions
from tba.config import parse_known
from tba.errors import Missing, TBAError
from tba.types import Score


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The state of a run, in one line of `tba runs`."""

    run: str
    task: str
    parent: str  # RUN@STEP for a fork, followed by "replayed" for a replay; else empty
    state: str  # new, running, stopping, stopped, failed, interrupted, finished or unreadable
    step: int | None
    version: int | None
    score: float | None  # of the newest evaluated version: the metric `greedy` if it has one, else the first metric
    searchers: int  # searchers that are alive


def summaries(root: str) -> tuple[list[Summary], list[str]]:
    """Return a summary of every run under a root, the newest first and runs whose `run.json` is damaged at the end, and
    a warning for each run that has damaged records."""
    urls = run_urls(root)
    runs: list[_Listed] = []
    with bar("reading runs") as tell, ThreadPoolExecutor(8) as pool:
        for done, listed in enumerate(pool.map(_summary_at, urls), start=1):
            runs += [listed] if listed else []
            tell(done, len(urls))
    runs.sort(key=lambda it: (it.created_at, it.summary.run), reverse=True)
    return [it.summary for it in runs], [it.warning for it in runs if it.warning]


class _Listed(NamedTuple):
    created_at: str
    summary: Summary
    warning: str  # empty if the run has no damage


def _summary_at(url: str) -> _Listed | None:
    """Return the summary of the run at a URL; None if there is no run."""
    name = url.rpartition("/")[2]
    try:
        run = Run.open(url)
    except Missing:
        return None
    except TBAError as error:
        return _Listed("", unreadable(name), f"run {name} cannot be read: {plain(str(error))}")
    damage = DamageLog()
    summary = summarise(run, damage)
    return _Listed(run.created_at, summary, in_words(run, damage.found()) if damage.found() else "")


def summarise(run: Run, damage: DamageLog | None = None) -> Summary:
    """Return the summary of a run. Damaged objects are left out and noted in `damage`. A run that cannot be read at all
    has the state `unreadable`."""
    damage = DamageLog() if damage is None else damage
    run = run.for_reading(damage.looking_at)
    task = str(run.config.get("task", {}).get("name", ""))
    try:
        config = parse_known(run.config)
        ledger = [name for entry in run.store.list(layout.STEPS) if (name := layout.parse_ledger(entry.key))]
        spans = chain_as_readable(run, ledger, damage)
        leases = living(read_leases(run, damage.looking_at), config.limits.silent_after)
        closed = max((name.number for name in ledger if accepts(spans, name)), default=0)
        sync = max(closed, config.start.sync)  # a fork whose start is gone has no chain of attempts
        scores = [it for it in Evaluations(run).scores(damage.looking_at) if stands(spans, it.version)]
        wanted: State | None = None
        with damage.looking_at(layout.STATE):
            wanted = read_state(run)
        scored = max((score.version.number for score in scores), default=-1)
        return Summary(
            run=run.name,
            task=task,
            parent=_parent(run),
            state=state(run, wanted, alive=bool(leases), finished=sync == scored == config.last_sync),
            step=max(_told_step(run, leases), config.step_of_sync(sync)),
            version=_newest_version(run),
            score=_score(scores),
            searchers=sum(lease.role.startswith("searcher") for lease in leases),
        )
    except TBAError:
        return unreadable(run.name, task, _parent(run))


def has_all(run: Run) -> bool:
    """Return True if a run has finished and has stored its last checkpoint."""
    if summarise(run).state != "finished":
        return False
    newest = Checkpoints(run).newest()
    return newest is not None and newest.number == parse_known(run.config).last_sync


def unreadable(run: str, task: str = "", parent: str = "") -> Summary:
    return Summary(
        run=run, task=task, parent=parent, state="unreadable", step=None, version=None, score=None, searchers=0
    )


def _parent(run: Run) -> str:
    if run.parent is None:
        return ""
    return f"{run.parent.run}@{run.parent.step}" + (" replayed" if run.parent.replays is not None else "")


def state(run: Run, wanted: State | None, *, alive: bool, finished: bool) -> str:
    if wanted is None:
        return "unreadable"
    if alive:
        return "running" if wanted.desired == "run" else "stopping"
    if finished:
        return "finished"
    if wanted.desired == "stop":
        return "failed" if wanted.why.startswith(FAILED_WHY) else "stopped"
    inherited = run.parent.attempts if run.parent else 0
    return "interrupted" if newest_attempt(run) > inherited else "new"


def living(leases: list[Lease], silent_after: float) -> list[Lease]:
    """Return the leases of roles that have not ended and have renewed their lease within `silent_after` seconds. This
    compares the clocks of two machines, which is good enough for display. Code that acts on a silent role watches the
    lease for a while instead."""
    now = datetime.now(UTC)
    return [
        lease
        for lease in leases
        if lease.status not in CLOSED
        and abs((now - datetime.fromisoformat(lease.renewed_at)).total_seconds()) < silent_after
    ]


def newest_sync(run: Run, spans: list[Span]) -> int:
    """Return the newest sync with a stored ledger that counts for the chain of attempts `spans`; 0 if there is none."""
    names = [layout.parse_ledger(entry.key) for entry in run.store.list(layout.STEPS)]
    return max((name.number for name in names if name and accepts(spans, name)), default=0)


def _told_step(run: Run, leases: list[Lease]) -> int:
    """Return the step that a living trainer reports in its lease. It is ahead of the ledger, which grows at syncs."""
    return max((int(lease.progress.get("step", 0)) for lease in leases if lease.role == "trainer"), default=0)


def _newest_version(run: Run) -> int | None:
    newest = Versions(run).newest()
    return newest.number if newest else None


def _score(scores: list[Score]) -> float | None:
    """Return the score of the newest evaluated version: its metric `greedy`, or its first metric if there is none."""
    if not scores:
        return None
    newest = max((score.version for score in scores), key=lambda version: version.order)
    own = {score.metric: score.value for score in scores if score.version == newest}
    return own.get("greedy", next(iter(own.values())))
