"""`tba report`: a run as one HTML file with its curves and tables; it needs no network and nothing beside it."""

from collections.abc import Iterable
from contextlib import closing
from functools import partial
from html import escape
from pathlib import Path
from statistics import median

import duckdb

from flows.pages.charts import Series, line_chart, picture
from flows.pages.html import (
    CONTROLS,
    Table,
    ask,
    charts,
    clock,
    damage_mark,
    document,
    heading,
    save,
    section,
    table_of,
)
from flows.pages.report import lineage, samples, selection
from flows.planning.run_summary import Summary, summarise
from flows.progress import bar
from flows.queries.damage_report import is_inside_an_object, warn
from storage import layout
from storage.local_files.regular_files import irregular_kind
from storage.queries.tables import by_name
from storage.queries.views import connect
from storage.runs.events import ROUTINE
from storage.runs.run import Run
from tba.errors import StorageError

_MOST_LINES = 8  # of one chart
_PICTURES = {"Reward of batches": "reward_mean", "Loss": "loss", "Mean age of draws, in steps": "age_mean"}

SCORES = """
select metric, step, value from evaluations where not abandoned and value is not null
order by length(metric), metric, step
"""

BY_VERSION = f"""
select version_step, avg(reward) as reward, avg(length) as length, avg(finished::int) as finished
from trajectories where searcher < {layout.IMPORTS} group by version_step order by version_step
"""

BRANCHES = """
select
    step, avg((branch = 'recent')::int) as recent, avg(age) filter (branch = 'recent') as age_recent,
    avg(age) filter (branch <> 'recent') as age_prioritised
from draws group by step order by step
"""

SPEEDS = """
with
    stored as (
        select
            searcher, seq, min(step) as step, sum(length) as tokens, sum(generate_seconds) as busy,
            max(created_at) as stored_at
        from trajectories group by searcher, seq
    ),
    timed as (
        select *, epoch(stored_at - lag(stored_at) over (partition by searcher order by seq)) as seconds from stored
    )
select
    printf('searcher-%03d', searcher) as role, step, sum(tokens) / sum(seconds) as tokens_per_second,
    sum(busy) / sum(seconds) as generating
from timed where seconds > 0 and step is not null group by searcher, step order by searcher, step
"""

ADOPTIONS = """
select role, s.step, epoch(e.created_at - s.created_at) as seconds
from events e join syncs s on e.data->>'version' = printf('%06d-a%04d', s.sync, s.attempt)
where kind = 'version-adopted' order by role, s.step
"""

STEPS = "select * from steps order by step"

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

ATTEMPTS = "select attempt, continues_sync, continues_attempt, created_at from attempts order by attempt"

ALARMS = "select began_at, ended_at, role, kind, about, severity, message from alarms order by began_at"

EVENTS = f"""
select created_at, role, life, severity, kind, message from events where kind not in {*ROUTINE, ""} order by created_at
"""


def write(run: Run, output: str | None = None) -> Path:
    """Write the report; returns where it is: inside the folder of a local run unless said otherwise."""
    inside = run.store.local_path(layout.REPORT)
    if inside and not output and (kind := irregular_kind(inside)):
        raise StorageError(f"{inside} is {kind}, where the report would be written: move it away, or give --output")
    return save(render(run), Path(output) if output else inside or Path(f"{run.name}-report.html"))


def render(run: Run) -> str:
    try:
        return _render(run)
    except duckdb.Error as error:
        if not is_inside_an_object(error):
            raise
        return _render(run, thorough=True)


def _render(run: Run, *, thorough: bool = False) -> str:
    with bar("copying what is new") as tell:
        con = connect(run, progress=tell, thorough=thorough)
    damage = warn(run, con)
    steps = ask(con, STEPS)
    scores = ask(con, SCORES)
    parts = [
        damage_mark(damage),
        _tiles(con, run, steps, scores),
        _curves(con, steps, scores),
        selection.section(con),
        samples.section(con),
        section("Searchers", ask(con, SEARCHERS)),
        section("Evaluations", ask(con, EVALUATIONS)),
        section("Versions that are kept", ask(con, VERSIONS)),
        lineage.section(run),
        section("Attempts", ask(con, ATTEMPTS)),
        section("Alarms", ask(con, ALARMS)),
        _events(ask(con, EVENTS)),
        _settings(run),
        f'<footer><p>Every number here is a query: <code>tba sql {escape(run.name)} "select * from steps"</code>. '
        "Times are UTC.</p></footer>",
    ]
    return document(run.name, _head(run, summarise(run)), parts, [clock(con)])


def pictures(run: Run) -> list[tuple[str, str]]:
    """The first curves with their titles, for what shows pictures and runs no scripts."""
    with closing(connect(run)) as con:
        steps, scores = ask(con, STEPS), ask(con, SCORES)
    found = {"Scores of versions": score_lines(scores).get("", [])}
    found |= {title: [Series(name, steps.points(name))] for title, name in _PICTURES.items()}
    drawn = [(title, picture(title, lines, x_name="step")) for title, lines in found.items()]
    return [(title, svg) for title, svg in drawn if svg]


# --- parts of the page ----------------------------------------------------------------------------------------------


def _head(run: Run, summary: Summary) -> str:
    return (
        f"<header><h1>{escape(run.name)}</h1><p class='lead'>{escape(summary.task)} · {escape(summary.state)} · "
        f"created {escape(run.created_at[:19].replace('T', ' '))} · {escape(run.code_version)}</p></header>"
    )


def _tiles(con: duckdb.DuckDBPyConnection, run: Run, steps: Table, scores: Table) -> str:
    trajectories, shards, waiting, tokens, draws, attempts, took = ask(con, TOTALS).rows[0]
    last = max(steps.column("step"), default=0)
    planned = run.config.get("training", {}).get("steps")
    facts = [("steps", f"{last:,} of {planned:,}" if planned else f"{last:,}")]
    for metric in dict.fromkeys(scores.column("metric")):
        values = [value for name, _, value in scores.rows if name == metric]
        facts.append((f"{metric}, first → last", f"{values[0]:.3f} → {values[-1]:.3f}"))
    facts += [
        ("trajectories", f"{trajectories:,}"),
        ("waiting for a sync", f"{waiting:,}"),
        ("shards", f"{shards:,}"),
        ("tokens generated", f"{int(tokens or 0):,}"),
        ("rows drawn", f"{draws:,}"),
        ("attempts", f"{attempts or 0}"),
        ("searching took", str(took).split(".")[0] if took is not None else "–"),
    ]
    tiles = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    return f'<dl class="tiles">{tiles}</dl>'


def _curves(con: duckdb.DuckDBPyConnection, steps: Table, scores: Table) -> str:
    versions = ask(con, BY_VERSION)
    parts = [
        charts("Learning", _learning(steps, scores, versions)),
        charts("Data", _data(steps, ask(con, BRANCHES), versions)),
        charts("Speed", _speed(steps, ask(con, SPEEDS), ask(con, ADOPTIONS))) + _timing(steps),
    ]
    return f"<section>{CONTROLS}{''.join(parts)}</section>" if any(parts) else ""


def _learning(steps: Table, scores: Table, versions: Table) -> list[str]:
    return [
        *evaluated(scores),
        line_chart(
            "Reward",
            [
                Series("of batches", steps.points("reward_mean")),
                Series("of trajectories, by version", versions.points("reward", x="version_step")),
            ],
            note="A trajectory counts at the step of the version that generated it.",
        ),
        _chart(steps, "Loss", "loss"),
        _chart(steps, "Mean absolute residual", "residual_abs"),
        _chart(steps, "log Z", "log_z"),
        _chart(steps, "log π − log π_ref of batches", "log_ratio_mean"),
        _chart(steps, "Gradient norm", "grad_norm"),
        _chart(steps, "Entropy", "entropy"),
        _chart(steps, "Loss of the values", "value_loss"),
        _chart(steps, "Share of the returns that the values explain", "explained_variance"),
        _changing(steps, "Learning rate", "lr"),
        _changing(steps, "beta", "beta"),
    ]


def _data(steps: Table, branches: Table, versions: Table) -> list[str]:
    by_version = partial(versions.points, x="version_step")
    return [
        line_chart(
            "Age of draws, in steps",
            [
                Series("recent", branches.points("age_recent")),
                Series("prioritised", branches.points("age_prioritised")),
                Series("oldest", steps.points("age_max")),
            ],
        ),
        line_chart("Share of draws from the newest sync", [Series("recent", branches.points("recent"))]),
        line_chart("Response length, by version", [Series("tokens", by_version("length"))]),
        line_chart("Responses that ended by themselves", [Series("share", by_version("finished"))]),
    ]


def _speed(steps: Table, speeds: Table, adoptions: Table) -> list[str]:
    return [
        line_chart(
            "Seconds of a step",
            [
                Series("step", steps.points("seconds_step")),
                Series("wait", steps.points("seconds_wait")),
                Series("backlog", steps.points("seconds_backlog")),
            ],
        ),
        line_chart("Tokens per second of each searcher", _by_role(speeds, "tokens_per_second")),
        line_chart(
            "Share of their time in which searchers generate",
            _by_role(speeds, "generating"),
            note="The rest scores, computes log-probabilities, stores and adopts; overlapping rounds count each.",
        ),
        line_chart(
            "Seconds from a sync to its version's adoption",
            _by_role(adoptions, "seconds"),
            note="By the clocks of their machines.",
        ),
    ]


def _by_role(table: Table, name: str) -> list[Series]:
    """A line of each role; of many roles their least, median and greatest."""
    found = {role: Table(table.columns, [row for row in table.rows if row[0] == role]) for role in table.column("role")}
    if len(found) <= _MOST_LINES:
        return [Series(role, rows.points(name)) for role, rows in found.items()]
    at: dict[int, list[float]] = {}
    for step, value in table.points(name):
        at.setdefault(step, []).append(value)
    return [
        Series(f"{what} of {len(found)} searchers", [(step, of(values)) for step, values in at.items()])
        for what, of in (("least", min), ("median", median), ("greatest", max))
    ]


def evaluated(scores: Table) -> list[str]:
    """One chart of the rewards of evaluations, and one of each measure of the task's own: scales differ."""
    return [
        line_chart(measure.replace("_", " ") or "Scores of versions", lines)
        for measure, lines in score_lines(scores).items()
    ]


def score_lines(scores: Table) -> dict[str, list[Series]]:
    """By measure, rewards under an empty name."""
    lines: dict[str, list[Series]] = {}
    for metric in dict.fromkeys(scores.column("metric")):
        of, _, measure = metric.partition("_")
        points = [(step, value) for name, step, value in scores.rows if name == metric]
        lines.setdefault(measure, []).append(Series(of, points, marked=True))
    return lines


def _chart(steps: Table, title: str, metric: str) -> str:
    return line_chart(title, [Series(metric, steps.points(metric))])


def _changing(steps: Table, title: str, metric: str) -> str:
    """A schedule, unless it is constant."""
    return _chart(steps, title, metric) if len(set(steps.column(metric))) > 1 else ""


def _timing(steps: Table) -> str:
    """Where the trainer's time went; parts of the thread ahead run beside the gradient step."""
    total = _sum(steps.column("seconds_step"))
    if not total:
        return ""
    rows = ""
    for name in steps.columns:
        if not name.startswith("seconds_") or not (spent := _sum(steps.column(name))):
            continue
        share = spent / total
        rows += (
            f"<tr><td>{escape(name.removeprefix('seconds_').replace('_', ' and '))}</td>"
            f"<td class='n'>{spent:,.1f} s</td>"
            f"<td class='n'>{spent / len(steps.rows):.4f} s</td><td class='n'>{share:.1%}</td>"
            f"<td class='share'><div class='fill' style='width:{min(share, 1):.1%}'></div></td></tr>"
        )
    return (
        "<h3>Where the trainer's time went</h3><div class='scroll'><table>"
        "<tr><th>part</th><th class='n'>in all</th><th class='n'>a step</th>"
        f"<th class='n'>of the steps' time</th><th></th></tr>{rows}</table></div>"
        "<p class='note'>wait is what the trainer stood still for; sync, draw, fetch and collate run beside the "
        "gradient step.</p>"
    )


def _events(table: Table) -> str:
    if not table.rows:
        return ""
    severity = table.columns.index("severity")
    classes = [row[severity] if row[severity] in ("warning", "error") else "" for row in table.rows]
    return heading("Events") + table_of(table, classes)


def _settings(run: Run) -> str:
    settings = Table(["setting", "value"], list(by_name(run)))
    return (
        f"{heading('Settings')}<details><summary>{len(settings.rows)} settings</summary>{table_of(settings)}</details>"
    )


def _sum(values: Iterable[float | None]) -> float:
    return sum(value for value in values if value is not None)
