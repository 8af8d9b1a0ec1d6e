"""The first page, and the list of steps."""

from html import escape

from flows.escaping import line
from flows.pages.browse.components import frame, table, tiles, to_sql, to_step, to_trajectory, to_version, told
from flows.pages.browse.session import Look
from flows.pages.charts import Series, line_chart
from flows.pages.html import Table, heading
from flows.pages.report.page import SCORES, evaluated
from storage.runs.events import ROUTINE

_STEPS_A_PAGE = 100
_NEWEST = 12

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


def page(look: Look) -> str:
    curves, scores = look.ask(CURVES), look.ask(SCORES)
    charts = [
        *evaluated(scores),
        line_chart("Reward of batches", [Series("reward", curves.points("reward_mean"))]),
        line_chart("Loss", [Series("loss", curves.points("loss"))]),
        line_chart("Gradient norm", [Series("gradient norm", curves.points("grad_norm"))]),
    ]
    steps = look.ask(f"{STEPS} limit {_NEWEST}")
    events = look.rows(EVENTS)
    return frame(
        look,
        "/",
        "run",
        [
            _head(look),
            _tiles(look, scores),
            _where_to_begin(look),
            f"<div class='grid-of-charts'>{''.join(charts)}</div>" if any(charts) else "",
            f"{heading('Newest steps')}{_table(steps)}<p class='note'><a href='/steps'>all steps</a></p>"
            if steps.rows
            else "",
            heading("Newest events") + events_table(events) if events else "",
        ],
    )


def steps_page(look: Look, page: int) -> str:
    steps = look.ask(f"{STEPS} limit {_STEPS_A_PAGE + 1} offset {page * _STEPS_A_PAGE}")
    more = len(steps.rows) > _STEPS_A_PAGE
    steps.rows[_STEPS_A_PAGE:] = []
    newer = f"<a href='/steps?page={page - 1}'>← newer</a>" if page else "<span></span>"
    older = f"<a href='/steps?page={page + 1}'>older →</a>" if more else "<span></span>"
    found = _table(steps) if steps.rows else "<p class='lead'>There are none yet.</p>"
    here = f"/steps?page={page}" if page else "/steps"
    parts = [
        "<h1>Steps</h1><p class='lead'>Gradient steps of the attempts that the current weights descend from, the "
        f"newest first; {to_sql(STEPS)}.</p><br>",
        found,
        f"<nav class='pages'>{newer}{older}</nav>",
    ]
    return frame(look, here, "steps", parts)


def events_table(events: list[dict[str, object]]) -> str:
    names = {"created_at": False, "role": False, "kind": False, "message": False}
    classes = [str(it["severity"]) for it in events]
    return table(names, [[told(it[name]) for name in names] for it in events], classes)


def _head(look: Look) -> str:
    summary, run = look.summary, look.run
    fork = f" · a fork of {line(summary.parent)}" if summary.parent else ""
    return (
        f"<h1>{escape(run.name)}</h1><p class='lead'>{line(summary.task)} · {escape(summary.state)}{fork} · created "
        f"{escape(run.created_at[:19].replace('T', ' '))}</p>"
    )


def _tiles(look: Look, scores: Table) -> str:
    trajectories, draws, prompts, attempts, alarms = look.ask(COUNTS).rows[0]
    planned = look.run.config.get("training", {}).get("steps")
    last = look.ask("select max(step) from steps").rows[0][0] or 0
    facts = [("steps", f"{last:,} of {planned:,}" if isinstance(planned, int) else f"{last:,}")]
    for metric in list(dict.fromkeys(scores.column("metric")))[:4]:
        values = [value for name, _, value in scores.rows if name == metric]
        facts.append((f"{metric}, first → last", f"{told(float(values[0]))} → {told(float(values[-1]))}"))
    facts += [
        ("trajectories", f"<a href='/trajectories'>{int(trajectories or 0):,}</a>"),
        ("drawn by steps", told(draws)),
        ("prompts drawn", told(prompts)),
        ("attempts", told(attempts)),
    ]
    if alarms:
        facts.append(("alarms that last", f"<a href='/sql?query=from+alarms'>{alarms:,}</a>"))
    return tiles(facts)


def _where_to_begin(look: Look) -> str:
    newest, steepest, skipped, favourite = look.ask(WORTH).rows[0]
    if newest is None:
        return (
            "<section class='words'><p>No step has been stored yet: steps appear here at the first sync. "
            "<a href='/trajectories'>Trajectories</a> may be there already.</p></section>"
        )
    places = [f"the newest step, {to_step(newest)}", f"the one with the largest gradient, {to_step(steepest)}"]
    if skipped is not None:
        places.append(f"the first that was skipped, {to_step(skipped)}")
    places.append(f"what was drawn most often of late, {to_trajectory(favourite)}")
    return (
        "<section class='words'><p>Searchers generate responses to prompts, here called <a href='/trajectories'>"
        "trajectories</a>; each <a href='/steps'>step</a> draws some of them and makes the policy give some more often "
        "and others less. A step's page says which and why; a trajectory's page shows it token by token, who wrote it "
        f"and who learned from it.</p><p>Begin with {', '.join(places[:-1])}, or {places[-1]}.</p></section>"
    )


def _table(steps: Table) -> str:
    numbers = dict.fromkeys(("loss", "grad_norm", "reward_mean", "age_mean", "age_max", "recent_share"), True)
    names = {"step": True, "from version": True, **numbers, "": False}
    rows = [
        [
            to_step(step),
            to_version(version),
            *map(told, values),
            "skipped" if skipped else "clipped" if clipped else "",
        ]
        for step, version, *values, skipped, clipped in steps.rows
    ]
    return table(names, rows)
