"""What a page is made of: its style, and tables that are answers to queries."""

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import duckdb

from flows import escaping
from flows.pages.tables import Table, ask
from flows.pages.values import number
from storage.objects.damage import Damage
from tba.errors import ConfigError

__all__ = ["Table", "ask"]

_MOST_ROWS = 400  # of a table; then its first and last half of them
_MOST_TICKS = 1500  # of a clock

CLOCK = "select step, sum(coalesce(seconds_step, 0)) over (order by step) from steps order by step"

STYLE = """
:root { color-scheme: light dark; --page: #fbfaf8; --card: #ffffff; --ink: #1f2328; --faint: #6a717a; --rule: #e2e0db;
  --c0: #2563a8; --c1: #bd5415; --c2: #2c7d54; --c3: #79489c; --c4: #9a7500;
  --c5: #1d7f8c; --c6: #b03a6f; --c7: #6b6f76; }
@media (prefers-color-scheme: dark) { :root { --page: #15171a; --card: #1d2024; --ink: #e4e6e9; --faint: #99a1aa;
  --rule: #32363c; --c0: #6ea9e6; --c1: #ef9657; --c2: #62c294; --c3: #b795d8; --c4: #d9b44a;
  --c5: #5cc3d1; --c6: #e884b3; --c7: #a3a8af; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 1080px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { margin: 0; font-size: 1.7rem; letter-spacing: -0.01em; }
h2 { margin: 2.4rem 0 0.8rem; font-size: 1.1rem; }
h3 { margin: 1.4rem 0 0.6rem; font-size: 0.95rem; }
p.lead, p.note, footer { color: var(--faint); margin: 0.2rem 0 0; }
p.note, footer { font-size: 0.85rem; }
code { font: 0.88em ui-monospace, SFMono-Regular, Menlo, monospace; }
dl.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 0.7rem;
  margin: 1.4rem 0 0; }
dl.tiles div { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 0.6rem 0.8rem; }
dl.tiles dt { color: var(--faint); font-size: 0.8rem; }
dl.tiles dd { margin: 0; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
.grid-of-charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 0.9rem;
  margin-top: 0.9rem; }
figure { margin: 0; background: var(--card); border: 1px solid var(--rule); border-radius: 8px;
  padding: 0.7rem 0.8rem; }
figcaption { display: flex; flex-wrap: wrap; gap: 0.2rem 0.9rem; align-items: baseline; }
svg { width: 100%; height: auto; display: block; }
.grid { stroke: var(--rule); stroke-width: 1; } .axis { stroke: var(--faint); stroke-width: 1; }
.level { stroke: var(--faint); stroke-width: 1; stroke-dasharray: 4 4; }
.tick { fill: var(--faint); font-size: 11px; font-variant-numeric: tabular-nums; }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; } .band { opacity: 0.16; }
.key { font: inherit; font-size: 0.85rem; color: var(--faint); background: none; border: 0; padding: 0;
  text-align: left; } button.key:enabled { cursor: pointer; }
.key[aria-pressed="false"] { text-decoration: line-through; opacity: 0.55; }
.key::before { content: ""; display: inline-block; width: 0.9em; height: 0.2em; margin-right: 0.35em;
  border-radius: 1px; vertical-align: middle; background: currentColor; }
.l0 { stroke: var(--c0); } .l1 { stroke: var(--c1); } .l2 { stroke: var(--c2); } .l3 { stroke: var(--c3); }
.l4 { stroke: var(--c4); } .l5 { stroke: var(--c5); } .l6 { stroke: var(--c6); } .l7 { stroke: var(--c7); }
.b0, .d0 { fill: var(--c0); } .b1, .d1 { fill: var(--c1); } .b2, .d2 { fill: var(--c2); } .b3, .d3 { fill: var(--c3); }
.b4, .d4 { fill: var(--c4); } .b5, .d5 { fill: var(--c5); } .b6, .d6 { fill: var(--c6); } .b7, .d7 { fill: var(--c7); }
.k0::before { color: var(--c0); } .k1::before { color: var(--c1); } .k2::before { color: var(--c2); }
.k3::before { color: var(--c3); } .k4::before { color: var(--c4); } .k5::before { color: var(--c5); }
.k6::before { color: var(--c6); } .k7::before { color: var(--c7); }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--rule); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-size: 0.88rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.32rem 0.75rem; text-align: left; border-bottom: 1px solid var(--rule); vertical-align: top; }
th { color: var(--faint); font-weight: 600; white-space: nowrap; } tr:last-child td { border-bottom: 0; }
td.n, th.n { text-align: right; white-space: nowrap; }
td.share { width: 40%; } .fill { height: 0.75em; border-radius: 2px; background: var(--c0); }
details { margin-top: 0.6rem; } summary { cursor: pointer; padding: 0.2rem 0; }
nav { display: flex; flex-wrap: wrap; gap: 0.2rem 1rem; margin: 1.2rem 0 0; font-size: 0.88rem; }
a { color: var(--c0); text-decoration: none; } a:hover { text-decoration: underline; }
.controls { position: sticky; top: 0; z-index: 2; display: flex; flex-wrap: wrap; gap: 0.4rem 1.2rem;
  align-items: center; padding: 0.5rem 0; margin-top: 0.5rem; background: var(--page); color: var(--faint);
  font-size: 0.85rem; border-bottom: 1px solid var(--rule); }
.controls[hidden], .readout[hidden] { display: none; }
.controls label, .controls span { display: inline-flex; align-items: center; gap: 0.35rem; }
input, select, .controls button { font: inherit; color: var(--ink); accent-color: var(--c0); }
input[type="search"], select, .controls button { background: var(--card); border: 1px solid var(--rule);
  border-radius: 6px; padding: 0.25rem 0.5rem; } input[type="search"] { flex: 1 1 14rem; min-width: 0; }
figure { position: relative; } figure[data-chart] svg { touch-action: pan-y; }
figure:focus-visible { outline: 2px solid var(--c0); outline-offset: 1px; }
.cross { stroke: var(--faint); stroke-width: 1; pointer-events: none; } .selection { fill: var(--c0); opacity: 0.12; }
.raw { opacity: 0.25; stroke-width: 1; }
.readout { position: absolute; top: 2.6rem; z-index: 1; pointer-events: none; background: var(--card);
  border: 1px solid var(--rule); border-radius: 6px; padding: 0.3rem 0.55rem; font-size: 0.82rem;
  font-variant-numeric: tabular-nums; box-shadow: 0 2px 8px rgb(0 0 0 / 12%); }
.sample { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 0.15rem 0.7rem; }
.sample summary { display: flex; gap: 0.7rem; align-items: baseline; }
.sample .reward { flex: none; min-width: 3.2rem; text-align: center; border-radius: 4px; padding: 0 0.3rem;
  font-variant-numeric: tabular-nums; font-size: 0.85rem;
  background: color-mix(in oklab, color-mix(in oklab, var(--c2) var(--share), var(--c1)) 22%, var(--card)); }
.sample .line { flex: 1; min-width: 0; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.sample .facts { flex: none; color: var(--faint); font-size: 0.82rem; }
@media (max-width: 600px) { .sample .facts { display: none; } }
pre { margin: 0.5rem 0; padding: 0.6rem 0.8rem; background: var(--page); border-radius: 6px; overflow-wrap: anywhere;
  white-space: pre-wrap; font: 0.86rem/1.5 ui-monospace, SFMono-Regular, Menlo, monospace; unicode-bidi: isolate; }
.faint { color: var(--faint); }
.odd { color: var(--c1); border: 1px solid currentColor; border-radius: 3px; padding: 0 0.15em; font-size: 0.75em; }
pre.response { border-left: 3px solid var(--c0); }
ul.tree { list-style: none; margin: 0.4rem 0; padding-left: 1.2rem; border-left: 1px solid var(--rule); }
ul.tree li { margin: 0.3rem 0; } li.here > b { color: var(--c0); }
.damage { border: 1px solid var(--c1); border-radius: 6px; padding: 0.3rem 0.9rem; }
.damage summary { color: var(--c1); }
tr.warning td { color: var(--c1); } tr.error td { color: var(--c1); font-weight: 600; }
"""


Clock = tuple[list[int], list[float]]
"""Steps, and the seconds that a run's trainer had worked when it had taken them. Pauses between lives do not count."""


def clock(con: duckdb.DuckDBPyConnection) -> Clock:
    rows = con.execute(CLOCK).fetchall()
    every = math.ceil(len(rows) / _MOST_TICKS) or 1
    seen = [row for n, row in enumerate(rows, start=1) if n % every == 0 or n == len(rows)]
    return [0, *(step for step, _ in seen)], [0.0, *(round(seconds, 3) for _, seconds in seen)]


def document(title: str, head: str, sections: Iterable[str], clocks: Sequence[Clock] = ()) -> str:
    """A whole page that needs nothing beside it. It tells the browser so, and to run no script but its own, whatever a
    model has written."""
    script = files("flows.pages.report").joinpath("report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    body = "\n".join(filter(None, sections))
    links = re.findall(r"<h2 id='([\w-]+)'>([^<]+)</h2>", body)
    nav = "".join(f"<a href='#{name}'>{text}</a>" for name, text in links)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} · TBA report</title><style>{STYLE}</style></head>\n"
        f"<body data-clocks='{json.dumps(clocks)}'>\n{head}<nav>{nav}</nav>\n{body}\n<script>{script}</script>"
        "</body></html>\n"
    )


def save(page: str, path: Path) -> Path:
    try:
        path.write_text(page, encoding="utf-8", errors="replace")  # a lone surrogate is no text
    except OSError as error:
        raise ConfigError(f"--output: {path}: {error.strerror}") from None
    return path


CONTROLS = (
    "<div class='controls' hidden><span>Over <label><input type='radio' name='axis' value='step' checked>steps</label> "
    "<label><input type='radio' name='axis' value='time'>time</label></span>"
    "<label>Smooth <input id='smooth' type='range' min='0' max='0.98' step='0.02' value='0'></label>"
    "<span>Drag over a chart to zoom, click a name to leave its line out.</span>"
    "<button id='unzoom' hidden>All of it</button></div>"
)
"""Of the charts of a page."""


def heading(title: str) -> str:
    """That can be linked to."""
    return f"<h2 id='{re.sub(r'[^a-z0-9]+', '-', title.lower()).strip('-')}'>{escape(title)}</h2>"


def charts(title: str, drawn: Iterable[str], note: str = "") -> str:
    """A heading and figures; empty text without any."""
    inside = "".join(drawn)
    told = f"<p class='note'>{note}</p>" if note else ""
    return f"{heading(title)}{told}<div class='grid-of-charts'>{inside}</div>" if inside else ""


def table_of(table: Table, classes: Sequence[str] = ()) -> str:
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
    return escape(number(value)) if isinstance(value, float) else escaping.shown(str(value))


def section(title: str, table: Table) -> str:
    """A heading and a table; empty text if it has no rows."""
    return f"{heading(title)}{table_of(table)}" if table.rows else ""


def damage_mark(damage: Sequence[Damage], run: str = "") -> str:
    """Return what a page says about damage above its figures; empty for a run without damage. `run` is the name of the
    run on a page about several."""
    if not damage:
        return ""
    of = f" of {escape(run)}" if run else ""
    count = f"1 object{of} is" if len(damage) == 1 else f"{len(damage):,} objects{of} are"
    listed = table_of(Table(["object", "problem"], [(it.key, it.problem) for it in damage]))
    return (
        f"<details class='damage' role='alert' open><summary><b>{count} damaged or missing; figures leave them out."
        f"</b></summary>{listed}</details>"
    )
