"""`tba report`: a run as one HTML file with its charts and tables. The file needs no network and no other file."""

from collections.abc import Iterable
from pathlib import Path

import duckdb
from markupsafe import Markup

from flows.pages import before_after
from flows.pages.report import lineage, samples, selection
from flows.pages.report.curves import ADOPTIONS, BRANCHES, BY_VERSION, SCORES, SPEEDS, STEPS, data, learning, speed
from flows.pages.report.document import clock, damage_table, document, save
from flows.pages.tables import Fact, Table, ask, facts
from flows.planning.run_summary import summarise
from flows.progress import bar
from flows.queries.damage_report import is_inside_an_object, warn
from storage import layout
from storage.local_files.regular_files import irregular_kind
from storage.queries.tables import by_name
from storage.queries.views import connect
from storage.runs.events import ROUTINE
from storage.runs.run import Run
from tba.errors import StorageError

TOTALS = """
select
    (select count(*) from trajectories), (select count(*) from shards where state = 'admitted'),
    (select count(*) from trajectories where sync is null),
    (select sum(length) from trajectories), (select count(*) from draws), (select max(attempt) from attempts),
    (select max(created_at) - min(created_at) from trajectories)
"""

SEARCHERS = """
select
    searcher, count(*) as trajectories, count(distinct round) as rounds, round(avg(reward), 4) as reward_mean,
    round(avg(length), 1) as length_mean, round(avg(finished::int), 4) as finished_share,
    round(sum(length) / nullif(sum(generate_seconds), 0), 1) as tokens_per_second,
    max(version_end) as newest_version, max(created_at) as last_heard
from trajectories group by searcher order by searcher
"""

EVALUATIONS = """
select
    version, attempt, step, metric, round(value, 4) as value, n, temperature, top_p, round(seconds, 1) as seconds,
    abandoned
from evaluations order by attempt, version, length(metric), metric
"""

VERSIONS = """
select version, attempt, step, abandoned, round(bytes / 1e6, 2) as megabytes, created_at
from versions where state = 'kept' order by attempt, version
"""

ATTEMPTS = """
select attempt, continues_sync, continues_attempt, created_at, compute_dtype, device, threads, torch
from attempts order by attempt
"""

ALARMS = "select began_at, ended_at, role, kind, about, severity, message from alarms order by began_at"

EVENTS = f"""
select created_at, role, life, severity, kind, message from events where kind not in {*ROUTINE, ""} order by created_at
"""


_TABLES = {"Searchers": SEARCHERS, "Evaluations": EVALUATIONS, "Kept versions": VERSIONS}
_LATER_TABLES = {"Attempts": ATTEMPTS, "Alarms": ALARMS}


def write(run: Run, output: str | None = None) -> Path:
    """Write the report and return its path. The path is `output` if given. Otherwise it is a file in the folder of a
    local run, or in the working directory for a remote run."""
    inside = run.store.local_path(layout.REPORT)
    if inside and not output and (kind := irregular_kind(inside)):
        raise StorageError(f"{inside} is {kind}, where the report would be written: move it away, or give --output")
    return save(render(run), Path(output) if output else inside or Path(f"{run.name}-report.html"))


def render(run: Run) -> Markup:
    try:
        return _render(run)
    except duckdb.Error as error:
        if not is_inside_an_object(error):
            raise
        return _render(run, thorough=True)


def _render(run: Run, *, thorough: bool = False) -> Markup:
    with bar("copying what is new") as tell:
        con = connect(run, progress=tell, thorough=thorough)
    damage = warn(run, con)
    steps, scores, versions = ask(con, STEPS), ask(con, SCORES), ask(con, BY_VERSION)
    events = ask(con, EVENTS)
    return document(
        "run.html",
        run.name,
        {
            "Learning": learning(steps, scores, versions),
            "Data": data(steps, ask(con, BRANCHES), versions),
            "Speed": speed(steps, ask(con, SPEEDS), ask(con, ADOPTIONS)),
        },
        [clock(con)],
        run=run,
        summary=summarise(run),
        created=run.created_at[:19].replace("T", " "),
        damage=damage_table(damage),
        facts=_facts(con, run, steps, scores),
        timing=_timing(steps),
        before_after=before_after.section(run),
        selection=selection.section(con),
        samples=samples.section(con),
        tables={title: ask(con, query) for title, query in _TABLES.items()},
        lineage=lineage.section(run),
        later_tables={title: ask(con, query) for title, query in _LATER_TABLES.items()},
        events=events,
        severities=[it if it in ("warning", "error") else "" for it in events.column("severity")],
        settings=Table(["setting", "value"], list(by_name(run))),
    )


def _facts(con: duckdb.DuckDBPyConnection, run: Run, steps: Table, scores: Table) -> list[Fact]:
    trajectories, shards, waiting, tokens, draws, attempts, took = ask(con, TOTALS).rows[0]
    last = max(steps.column("step"), default=0)
    planned = run.config.get("training", {}).get("steps")
    told = [Fact("steps", f"{last:,} of {planned:,}" if planned else last)]
    for metric in dict.fromkeys(scores.column("metric")):
        values = [value for name, _, value in scores.rows if name == metric]
        told.append(Fact(f"{metric}, first → last", f"{values[0]:.3f} → {values[-1]:.3f}"))
    return told + facts(
        [
            ("trajectories", trajectories),
            ("waiting for a sync", waiting),
            ("shards", shards),
            ("tokens generated", int(tokens or 0)),
            ("draws", draws),
            ("attempts", attempts or 0),
            ("search time", str(took).split(".")[0] if took is not None else None),
        ]
    )


def _timing(steps: Table) -> list[tuple[str, float, float, float]]:
    """Return each part of the trainer's time: its name, its total, its mean per step, and its share of the time of all
    steps."""
    total = _sum(steps.column("seconds_step"))
    spent = {name: _sum(steps.column(name)) for name in steps.columns if name.startswith("seconds_")}
    return [
        (name.removeprefix("seconds_").replace("_", " and "), seconds, seconds / len(steps.rows), seconds / total)
        for name, seconds in spent.items()
        if seconds and total
    ]


def _sum(values: Iterable[float | None]) -> float:
    return sum(value for value in values if value is not None)
