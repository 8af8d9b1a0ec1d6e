"""`tba report`: a run as one HTML file with its curves and tables; it needs no network and nothing beside it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

import duckdb

from flows.charts import Series, line_chart, number
from flows.progress import bar
from flows.runs import Summary, summarise
from storage import layout
from storage.events import ROUTINE
from storage.run import Run
from storage.views import connect
from tba.errors import ConfigError

SCORES = """
select metric, step, value from evaluations where not abandoned order by metric, step
"""

REWARD_BY_VERSION = """
select version_step, avg(reward), avg(length), avg(finished::int)
from trajectories group by version_step order by version_step
"""

BRANCHES = """
select step, avg((branch = 'recent')::int), avg(age) filter (branch = 'recent'), avg(age) filter (branch <> 'recent')
from draws group by step order by step
"""

STEPS = "select * from steps order by step"

TOTALS = """
select
    (select count(*) from trajectories), (select count(*) from shards),
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
select version, attempt, step, metric, round(value, 4) as value, n, round(seconds, 1) as seconds, abandoned
from evaluations order by attempt, version, metric
"""

VERSIONS = """
select version, attempt, step, state, abandoned, round(bytes / 1e6, 2) as megabytes, created_at
from versions order by attempt, version
"""

ATTEMPTS = "select attempt, continues_sync, continues_attempt, created_at from attempts order by attempt"

EVENTS = f"""
select created_at, role, life, severity, kind, message from events where kind not in {*ROUTINE, ""} order by created_at
"""

_MOST_ROWS = 400  # of a table; then its first and last half of them

STYLE = """
:root { color-scheme: light dark; --page: #fbfaf8; --card: #ffffff; --ink: #1f2328; --faint: #6a717a; --rule: #e2e0db;
  --c0: #2563a8; --c1: #bd5415; --c2: #2c7d54; --c3: #79489c; --c4: #9a7500; }
@media (prefers-color-scheme: dark) { :root { --page: #15171a; --card: #1d2024; --ink: #e4e6e9; --faint: #99a1aa;
  --rule: #32363c; --c0: #6ea9e6; --c1: #ef9657; --c2: #62c294; --c3: #b795d8; --c4: #d9b44a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 1080px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { margin: 0; font-size: 1.7rem; letter-spacing: -0.01em; }
h2 { margin: 2.4rem 0 0.8rem; font-size: 1.1rem; }
p.lead, p.note, footer { color: var(--faint); margin: 0.2rem 0 0; }
p.note, footer { font-size: 0.85rem; }
code { font: 0.88em ui-monospace, SFMono-Regular, Menlo, monospace; }
dl.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 0.7rem;
  margin: 1.4rem 0 0; }
dl.tiles div { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 0.6rem 0.8rem; }
dl.tiles dt { color: var(--faint); font-size: 0.8rem; }
dl.tiles dd { margin: 0; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
.grid-of-charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 0.9rem; }
figure { margin: 0; background: var(--card); border: 1px solid var(--rule); border-radius: 8px;
  padding: 0.7rem 0.8rem; }
figcaption { display: flex; flex-wrap: wrap; gap: 0.2rem 0.9rem; align-items: baseline; }
svg { width: 100%; height: auto; display: block; }
.grid { stroke: var(--rule); stroke-width: 1; } .axis { stroke: var(--faint); stroke-width: 1; }
.tick { fill: var(--faint); font-size: 11px; font-variant-numeric: tabular-nums; }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; } .band { opacity: 0.16; }
.key { font-size: 0.85rem; color: var(--faint); }
.key::before { content: ""; display: inline-block; width: 0.9em; height: 0.2em; margin-right: 0.35em;
  border-radius: 1px; vertical-align: middle; background: currentColor; }
.l0 { stroke: var(--c0); } .l1 { stroke: var(--c1); } .l2 { stroke: var(--c2); } .l3 { stroke: var(--c3); }
.l4 { stroke: var(--c4); }
.b0, .d0 { fill: var(--c0); } .b1, .d1 { fill: var(--c1); } .b2, .d2 { fill: var(--c2); } .b3, .d3 { fill: var(--c3); }
.b4, .d4 { fill: var(--c4); }
.k0::before { color: var(--c0); } .k1::before { color: var(--c1); } .k2::before { color: var(--c2); }
.k3::before { color: var(--c3); } .k4::before { color: var(--c4); }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--rule); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-size: 0.88rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.32rem 0.75rem; text-align: left; border-bottom: 1px solid var(--rule); vertical-align: top; }
th { color: var(--faint); font-weight: 600; white-space: nowrap; } tr:last-child td { border-bottom: 0; }
td.n, th.n { text-align: right; white-space: nowrap; }
td.share { width: 40%; } .fill { height: 0.75em; border-radius: 2px; background: var(--c0); }
details { margin-top: 0.6rem; } summary { cursor: pointer; padding: 0.2rem 0; }
tr.warning td { color: var(--c1); } tr.error td { color: var(--c1); font-weight: 600; }
"""


@dataclass(frozen=True)
class Table:
    """An answer: names and rows."""

    columns: list[str]
    rows: list[tuple[Any, ...]]

    def column(self, name: str) -> list[Any]:
        """The values of a column; nulls where this run has none of that name."""
        if name not in self.columns:
            return [None] * len(self.rows)
        place = self.columns.index(name)
        return [row[place] for row in self.rows]

    def points(self, name: str, *, x: str = "step") -> list[tuple[Any, Any]]:
        return list(zip(self.column(x), self.column(name), strict=True))


def write(run: Run, output: str | None = None) -> Path:
    """Write the report; returns where it is: inside the folder of a local run unless said otherwise."""
    inside = run.store.local_path(layout.REPORT)
    path = Path(output) if output else inside or Path(f"{run.name}-report.html")
    page = render(run)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output: {path}: {error.strerror}") from None
    return path


def render(run: Run) -> str:
    with bar("copying what is new") as tell:
        con = connect(run, progress=tell)
    steps = ask(con, STEPS)
    scores = ask(con, SCORES)
    parts = [
        _head(run, summarise(run)),
        _tiles(con, run, steps, scores),
        _curves(con, steps, scores),
        _timing(steps),
        _section("Searchers", ask(con, SEARCHERS)),
        _section("Evaluations", ask(con, EVALUATIONS)),
        _section("Versions", ask(con, VERSIONS)),
        _section("Attempts", ask(con, ATTEMPTS)),
        _events(ask(con, EVENTS)),
        _settings(run.config),
    ]
    title = f"{escape(run.name)} · TBA report"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head><body>\n" + "\n".join(filter(None, parts)) + "\n"
        f'<footer><p>Every number here is a query: <code>tba sql {escape(run.name)} "select * from steps"</code>. '
        "Times are UTC.</p></footer></body></html>\n"
    )


def ask(con: duckdb.DuckDBPyConnection, query: str) -> Table:
    found = con.execute(query)
    columns = [column[0] for column in found.description or ()]
    return Table(columns, found.fetchall())


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
    by_metric = {
        metric: [(step, value) for name, step, value in scores.rows if name == metric]
        for metric in dict.fromkeys(scores.column("metric"))
    }
    versions, branches = ask(con, REWARD_BY_VERSION), ask(con, BRANCHES)
    generated = [(row[0], row[1]) for row in versions.rows]
    charts = [
        line_chart("Accuracy", [Series(name, points, marked=True) for name, points in by_metric.items()]),
        line_chart(
            "Reward",
            [Series("of batches", steps.points("reward_mean")), Series("of trajectories, by version", generated)],
            note="A trajectory counts at the step of the version that generated it.",
        ),
        _chart(steps, "Loss", "loss"),
        _chart(steps, "Mean absolute residual", "residual_abs"),
        _chart(steps, "log Z", "log_z"),
        _chart(steps, "log π − log π_ref of batches", "log_ratio_mean"),
        line_chart(
            "Age of draws, in steps",
            [
                Series("recent", [(row[0], row[2]) for row in branches.rows]),
                Series("prioritised", [(row[0], row[3]) for row in branches.rows]),
                Series("oldest", steps.points("age_max")),
            ],
        ),
        line_chart("Share of draws from the newest sync", [Series("recent", [row[:2] for row in branches.rows])]),
        _chart(steps, "Gradient norm", "grad_norm"),
        _chart(steps, "Entropy", "entropy"),
        line_chart("Response length, by version", [Series("tokens", [(row[0], row[2]) for row in versions.rows])]),
        line_chart(
            "Responses that ended by themselves", [Series("share", [(row[0], row[3]) for row in versions.rows])]
        ),
        line_chart(
            "Seconds of a step",
            [
                Series("step", steps.points("seconds_step")),
                Series("wait", steps.points("seconds_wait")),
                Series("backlog", steps.points("seconds_backlog")),
            ],
        ),
        _changing(steps, "Learning rate", "lr"),
        _changing(steps, "beta", "beta"),
    ]
    drawn = "".join(charts)
    return f'<h2>Curves</h2><div class="grid-of-charts">{drawn}</div>' if drawn else ""


def _chart(steps: Table, title: str, metric: str) -> str:
    return line_chart(title, [Series(metric, steps.points(metric))])


def _changing(steps: Table, title: str, metric: str) -> str:
    """A schedule, unless it is constant."""
    return _chart(steps, title, metric) if len(set(steps.column(metric))) > 1 else ""


def _timing(steps: Table) -> str:
    """Where the trainer's time went; parts of the reader thread run beside the gradient step."""
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
        "<h2>Time</h2><div class='scroll'><table><tr><th>part</th><th class='n'>in all</th><th class='n'>a step</th>"
        f"<th class='n'>of the steps' time</th><th></th></tr>{rows}</table></div>"
        "<p class='note'>wait is what the trainer stood still for; sync, draw, fetch and collate run beside the "
        "gradient step.</p>"
    )


def _section(title: str, table: Table) -> str:
    if not table.rows:
        return ""
    return f"<h2>{escape(title)}</h2>{_table(table)}"


def _events(table: Table) -> str:
    if not table.rows:
        return ""
    severity = table.columns.index("severity")
    classes = [row[severity] if row[severity] in ("warning", "error") else "" for row in table.rows]
    return f"<h2>Events</h2>{_table(table, classes)}"


def _settings(config: Mapping[str, Any]) -> str:
    flat = Table(["setting", "value"], [(name, json.dumps(value)) for name, value in _flatten(config)])
    return f"<h2>Settings</h2><details><summary>{len(flat.rows)} settings</summary>{_table(flat)}</details>"


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _table(table: Table, classes: Sequence[str] = ()) -> str:
    rows = list(zip(table.rows, classes or [""] * len(table.rows), strict=True))
    left_out = max(0, len(rows) - _MOST_ROWS)
    numeric = [any(isinstance(row[i], int | float) for row in table.rows) for i in range(len(table.columns))]
    head = "".join(
        f"<th{_n(is_number)}>{escape(name)}</th>" for name, is_number in zip(table.columns, numeric, strict=True)
    )
    if left_out:
        half = _MOST_ROWS // 2
        gap = f"<tr><td colspan='{len(table.columns)}'>… {left_out:,} rows are left out …</td></tr>"
        body = _rows(rows[:half], numeric) + gap + _rows(rows[-half:], numeric)
    else:
        body = _rows(rows, numeric)
    return f"<div class='scroll'><table><tr>{head}</tr>{body}</table></div>"


def _rows(rows: Sequence[tuple[tuple[Any, ...], str]], numeric: Sequence[bool]) -> str:
    return "".join(
        f"<tr{f' class={css!r}' if css else ''}>"
        + "".join(f"<td{_n(is_number)}>{_cell(value)}</td>" for value, is_number in zip(row, numeric, strict=True))
        + "</tr>"
        for row, css in rows
    )


def _n(is_number: bool) -> str:
    return " class='n'" if is_number else ""


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S}"
    if isinstance(value, int):
        return f"{value:,}"
    return escape(number(value) if isinstance(value, float) else str(value))


def _sum(values: Iterable[float | None]) -> float:
    return sum(value for value in values if value is not None)
