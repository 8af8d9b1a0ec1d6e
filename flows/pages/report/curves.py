"""The charts of a run: what the run learns, from which data, and how fast."""

from contextlib import closing
from functools import partial
from statistics import median

from flows.pages.charts import Chart, Series
from flows.pages.tables import Table, ask
from storage import layout
from storage.queries.views import connect
from storage.runs.run import Run

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


def pictures(run: Run) -> list[tuple[str, str]]:
    """Return the most important charts as SVG files, each with its title."""
    with closing(connect(run)) as con:
        steps, scores = ask(con, STEPS), ask(con, SCORES)
    found = {"Scores of versions": score_lines(scores).get("", [])}
    found |= {title: [Series(name, steps.points(name))] for title, name in _PICTURES.items()}
    drawn = [(title, Chart(title, lines).picture()) for title, lines in found.items()]
    return [(title, svg) for title, svg in drawn if svg]


def learning(steps: Table, scores: Table, versions: Table) -> list[Chart]:
    return [
        *score_charts(scores),
        Chart(
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
        _chart(steps, "Value loss", "value_loss"),
        _chart(steps, "Explained variance of the returns", "explained_variance"),
        *_changing(steps, "Learning rate", "lr"),
        *_changing(steps, "beta", "beta"),
    ]


def data(steps: Table, branches: Table, versions: Table) -> list[Chart]:
    by_version = partial(versions.points, x="version_step")
    return [
        Chart(
            "Age of draws, in steps",
            [
                Series("recent", branches.points("age_recent")),
                Series("prioritised", branches.points("age_prioritised")),
                Series("oldest", steps.points("age_max")),
            ],
        ),
        Chart("Share of draws from the newest sync", [Series("recent", branches.points("recent"))]),
        Chart("Response length, by version", [Series("tokens", by_version("length"))]),
        Chart("Share of finished responses", [Series("share", by_version("finished"))]),
    ]


def speed(steps: Table, speeds: Table, adoptions: Table) -> list[Chart]:
    return [
        Chart(
            "Seconds per step",
            [
                Series("step", steps.points("seconds_step")),
                Series("wait", steps.points("seconds_wait")),
                Series("backlog", steps.points("seconds_backlog")),
            ],
        ),
        Chart("Tokens per second of each searcher", _by_role(speeds, "tokens_per_second")),
        Chart(
            "Share of time in which searchers generate",
            _by_role(speeds, "generating"),
            note="In the rest of their time, searchers score, compute log-probabilities, store and adopt versions. "
            "Rounds that overlap all count.",
        ),
        Chart(
            "Seconds from a sync to the adoption of its version",
            _by_role(adoptions, "seconds"),
            note="Times come from the clocks of the searchers' machines.",
        ),
    ]


def _by_role(table: Table, name: str) -> list[Series]:
    """Return a line for each role. For many roles, return three lines: the lowest, median and highest value."""
    found = {role: Table(table.columns, [row for row in table.rows if row[0] == role]) for role in table.column("role")}
    if len(found) <= _MOST_LINES:
        return [Series(role, rows.points(name)) for role, rows in found.items()]
    at: dict[int, list[float]] = {}
    for step, value in table.points(name):
        at.setdefault(step, []).append(value)
    return [
        Series(f"{what} of {len(found)} searchers", [(step, of(values)) for step, values in at.items()])
        for what, of in (("lowest", min), ("median", median), ("highest", max))
    ]


def score_charts(scores: Table) -> list[Chart]:
    """Return a chart of the rewards of evaluations, and one chart for each other measure of the task, because the
    scales of measures differ."""
    return [
        Chart(measure.replace("_", " ") or "Scores of versions", lines)
        for measure, lines in score_lines(scores).items()
    ]


def score_lines(scores: Table) -> dict[str, list[Series]]:
    """Return the lines of the scores, grouped by measure. The rewards are under the empty text."""
    lines: dict[str, list[Series]] = {}
    for metric in dict.fromkeys(scores.column("metric")):
        of, _, measure = metric.partition("_")
        points = [(step, value) for name, step, value in scores.rows if name == metric]
        lines.setdefault(measure, []).append(Series(of, points, marked=True))
    return lines


def _chart(steps: Table, title: str, metric: str) -> Chart:
    return Chart(title, [Series(metric, steps.points(metric))])


def _changing(steps: Table, title: str, metric: str) -> list[Chart]:
    """Return the chart of a schedule in a list, or an empty list if the schedule is constant."""
    return [_chart(steps, title, metric)] if len(set(steps.column(metric))) > 1 else []
