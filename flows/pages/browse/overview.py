"""The overview, which is the first page, and the list of steps."""

from markupsafe import Markup

from flows.pages import addresses
from flows.pages.browse.frame import show
from flows.pages.browse.run_snapshot import RunSnapshot
from flows.pages.charts import Chart, Series
from flows.pages.report.curves import SCORES, score_charts
from flows.pages.tables import Fact, Table, facts
from flows.pages.values import written
from storage.runs.events import ROUTINE

_STEPS_A_PAGE = 100
_NEWEST = 12
_MOST_SCORES = 4

COUNTS = """
select
    (select sum(rows) from shards where state in ('admitted', 'waiting')), (select count(*) from draws),
    (select count(distinct prompt_id) from draws), (select max(attempt) from attempts),
    (select count(*) from alarms where ended_at is null)
"""
CURVES = "select step, reward_mean, loss, grad_norm from steps order by step"
STEPS = """
select step, version, loss, grad_norm, reward_mean, age_mean, age_max, recent_share, skipped, clipped
from steps order by step desc
"""
WORTH = """
select
    (select max(step) from steps), (select arg_max(step, grad_norm) from steps),
    (select min(step) from steps where skipped = 1),
    (select mode(trajectory_id) from draws where step > (select max(step) from steps) - 50)
"""
EVENTS = f"""
select created_at, role, severity, kind, message from events where kind not in {*ROUTINE, ""}
order by created_at desc limit {_NEWEST}
"""


def page(snapshot: RunSnapshot) -> Markup:
    curves, scores = snapshot.ask(CURVES), snapshot.ask(SCORES)
    charts = [
        *score_charts(scores),
        Chart("Reward of batches", [Series("reward", curves.points("reward_mean"))]),
        Chart("Loss", [Series("loss", curves.points("loss"))]),
        Chart("Gradient norm", [Series("gradient norm", curves.points("grad_norm"))]),
    ]
    newest, steepest, skipped, favourite = snapshot.ask(WORTH).rows[0]
    return show(
        snapshot,
        "/",
        "overview.html",
        summary=snapshot.summary,
        created=snapshot.run.created_at[:19].replace("T", " "),
        facts=_facts(snapshot, scores),
        newest=newest,
        steepest=steepest,
        skipped=skipped,
        favourite=favourite,
        charts=[chart.figure() for chart in charts],
        steps=snapshot.ask(f"{STEPS} limit {_NEWEST}"),
        events=snapshot.rows(EVENTS),
    )


def steps_page(snapshot: RunSnapshot, page: int) -> Markup:
    steps = snapshot.ask(f"{STEPS} limit {_STEPS_A_PAGE + 1} offset {page * _STEPS_A_PAGE}")
    has_older = len(steps.rows) > _STEPS_A_PAGE
    steps.rows[_STEPS_A_PAGE:] = []
    return show(
        snapshot,
        f"/steps?page={page}" if page else "/steps",
        "steps.html",
        query=STEPS,
        steps=steps,
        newer=f"/steps?page={page - 1}" if page else "",
        older=f"/steps?page={page + 1}" if has_older else "",
    )


def _facts(snapshot: RunSnapshot, scores: Table) -> list[Fact]:
    trajectories, draws, prompts, attempts, alarms = snapshot.ask(COUNTS).rows[0]
    planned = snapshot.run.config.get("training", {}).get("steps")
    last = snapshot.ask("select max(step) from steps").rows[0][0] or 0
    told = [Fact("steps", f"{last:,} of {planned:,}" if isinstance(planned, int) else last)]
    for metric in list(dict.fromkeys(scores.column("metric")))[:_MOST_SCORES]:
        values = [float(value) for name, _, value in scores.rows if name == metric]
        told.append(Fact(f"{metric}, first → last", f"{written(values[0])} → {written(values[-1])}"))
    told.append(Fact("trajectories", int(trajectories or 0), "/trajectories"))
    told += facts([("draws", draws), ("prompts drawn", prompts), ("attempts", attempts)])
    if alarms:
        told.append(Fact("open alarms", alarms, addresses.sql("from alarms")))
    return told
