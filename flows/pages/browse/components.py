"""What the pages have in common: their style, what stands around them, and how they show values."""

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from typing import Any
from urllib.parse import quote, urlencode

from flows.escaping import line
from flows.pages.browse.session import Look
from flows.pages.charts import number
from flows.pages.html import STYLE

_SHORT = 40  # characters of what is not broken into lines
_SHADES = 10  # of a colour that means more or less

_OWN = """
body { padding-top: 0; }
header.bar { display: flex; flex-wrap: wrap; gap: 0.2rem 1.1rem; align-items: baseline; padding: 0.8rem 0 0.7rem;
  margin-bottom: 1.6rem; border-bottom: 1px solid var(--rule); font-size: 0.9rem; }
header.bar b { font-size: 1rem; } header.bar .at { margin-left: auto; color: var(--faint); font-size: 0.82rem; }
header.bar a[aria-current] { color: var(--ink); font-weight: 600; }
.title { display: flex; flex-wrap: wrap; gap: 0.3rem 1rem; align-items: baseline; }
.title .around { margin-left: auto; display: flex; gap: 1rem; font-size: 0.9rem; }
.words { margin: 1.2rem 0 0; padding: 0.9rem 1.1rem; background: var(--card); border: 1px solid var(--rule);
  border-left: 3px solid var(--c0); border-radius: 8px; }
.words p { margin: 0 0 0.55rem; } .words p:last-child { margin: 0; }
.words.wrong { border-left-color: var(--c1); }
q { quotes: "“" "”"; } q, .said { font-family: ui-monospace, SFMono-Regular, Menlo, monospace; font-size: 0.9em;
  overflow-wrap: anywhere; unicode-bidi: isolate; }
.up { color: var(--c2); } .down { color: var(--c1); }
pre.text { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; }
pre.tokens { font-size: 1rem;
  background: var(--card); border: 1px solid var(--rule); border-radius: 8px; line-height: 1.9; }
.t { border-radius: 3px; padding: 0.12em 0; box-shadow: inset 0 0 0 0.5px var(--rule); cursor: default; }
.t:hover, .t:focus { outline: 2px solid var(--ink); outline-offset: 0; }
.t:hover::after, .t:focus::after { content: attr(data-says); position: fixed; left: 0.8rem; right: 0.8rem;
  bottom: 0.8rem; z-index: 3; max-width: 46rem; margin: 0 auto; padding: 0.5rem 0.8rem; background: var(--ink);
  color: var(--page); border-radius: 6px; font: 0.88rem/1.4 system-ui, sans-serif; white-space: normal; }
.t.masked { opacity: 0.55; text-decoration: underline dotted; } .ends { color: var(--faint); }
.legend { display: flex; flex-wrap: wrap; gap: 0.3rem 1.2rem; align-items: center; color: var(--faint);
  font-size: 0.85rem; margin: 0.4rem 0; } .legend .scale { display: inline-flex; }
.legend .scale i { width: 1em; height: 1em; display: block; }
.chip { display: inline-block; min-width: 2.6rem; text-align: center; border-radius: 4px; padding: 0 0.35rem;
  font-size: 0.85rem; font-variant-numeric: tabular-nums; white-space: nowrap; }
.hits { list-style: none; margin: 0.8rem 0; padding: 0; background: var(--card); border: 1px solid var(--rule);
  border-radius: 8px; } .hits li { border-bottom: 1px solid var(--rule); } .hits li:last-child { border-bottom: 0; }
.hits a { display: grid; grid-template-columns: auto minmax(0, 1fr) auto; gap: 0.1rem 0.8rem; align-items: baseline;
  padding: 0.45rem 0.8rem; color: var(--ink); } .hits a:hover { text-decoration: none; background: var(--page); }
.hits .one { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; } .hits .facts { color: var(--faint);
  font-size: 0.82rem; white-space: nowrap; }
form.find { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 9rem), 1fr)); gap: 0.6rem 0.8rem;
  margin: 1.2rem 0 0; padding: 0.9rem 1rem; background: var(--card); border: 1px solid var(--rule);
  border-radius: 8px; } form.find .wide { grid-column: 1 / -1; }
form label { display: flex; flex-direction: column; gap: 0.15rem; color: var(--faint); font-size: 0.82rem;
  min-width: 0; }
form .pair { display: grid; grid-template-columns: 1fr 1fr; gap: 0.4rem; }
form input, form select, form textarea, form button { width: 100%; min-width: 0; font: inherit; font-size: 0.92rem;
  color: var(--ink); background: var(--page); border: 1px solid var(--rule); border-radius: 6px;
  padding: 0.3rem 0.5rem; }
form textarea, form input.sql { font: 0.86rem/1.5 ui-monospace, SFMono-Regular, Menlo, monospace; resize: vertical; }
form button { width: auto; justify-self: start; align-self: end;
  padding: 0.35rem 1.1rem; background: var(--c0); border-color: var(--c0);
  color: var(--card); font-weight: 600; cursor: pointer; }
:is(input, select, textarea, button, a, summary):focus-visible { outline: 2px solid var(--c0); outline-offset: 1px; }
p.wrong { color: var(--c1); font: 0.86rem/1.5 ui-monospace, SFMono-Regular, Menlo, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; margin: 0.3rem 0 0; }
nav.pages { justify-content: space-between; }
.slot { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; margin-top: 0.6rem; }
.slot > summary { display: flex; flex-wrap: wrap; gap: 0.2rem 0.8rem; align-items: baseline; padding: 0.5rem 0.8rem; }
.slot > summary .one { flex: 1 1 10rem; min-width: 0; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.slot .scroll { border: 0; border-top: 1px solid var(--rule); border-radius: 0 0 8px 8px; }
.slot p { margin: 0; padding: 0 0.8rem 0.5rem; }
svg.push { display: inline-block; width: 84px; height: 12px; vertical-align: -1px; }
svg.push line { stroke: var(--faint); } .raise { fill: var(--c2); } .lower { fill: var(--c1); }
td .short { white-space: nowrap; }
p.note + .scroll, .scroll + p.note { margin-top: 0.5rem; } details > form.find { margin: 0.3rem 0 0.8rem; }
@media (max-width: 600px) { .hits a { grid-template-columns: auto minmax(0, 1fr); } .hits .facts { grid-column: 2; } }
"""

_COLOURS = "".join(
    f".p{n} {{ background: color-mix(in oklab, var(--c2) {n * 6}%, var(--card)); }}\n"
    f".m{n} {{ background: color-mix(in oklab, var(--c1) {n * 6}%, var(--card)); }}\n"
    for n in range(1, _SHADES + 1)
)
SHEET = STYLE + _OWN + _COLOURS
_DIGEST = base64.b64encode(hashlib.sha256(SHEET.encode()).digest()).decode()

HEADERS = {
    "content-security-policy": f"default-src 'none'; style-src 'sha256-{_DIGEST}'; img-src data:; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
"""Of every answer: a browser runs nothing, fetches nothing, keeps nothing and tells nobody."""

_PLACES = {"/": "Run", "/steps": "Steps", "/trajectories": "Trajectories", "/sql": "SQL"}


def frame(look: Look, here: str, title: str, parts: Iterable[str]) -> str:
    """A whole page; `here` is its address."""
    links = "".join(
        f"<a href='{path}'{' aria-current=page' if path == here else ''}>{name}</a>" for path, name in _PLACES.items()
    )
    again = f"/refresh?{urlencode({'to': here})}"
    bar = (
        f"<header class='bar'><b>{escape(look.run.name)}</b>{links}<span class='at'>as of {look.at:%H:%M:%S} UTC · "
        f"<a href='{escape(again)}'>look again</a></span></header>"
    )
    return bare(f"{title} · {look.run.name}", bar + "\n".join(filter(None, parts)))


def bare(title: str, body: str, head: str = "") -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"{head}<title>{escape(title)}</title><style>{SHEET}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


# --- values -----------------------------------------------------------------------------------------------------------


def told(value: Any) -> str:
    """A value in a sentence or a tile."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return number(value).replace("-", "−") if value == value and abs(value) != float("inf") else str(value)
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S}"
    return line(str(value), 300)


def signed(value: float | None) -> str:
    """With its direction in colour."""
    if value is None:
        return "–"
    css = "up" if value > 0 else "down" if value < 0 else "faint"
    return f"<span class='{css}'>{'+' * (value > 0)}{told(value)}</span>"


def chip(reward: float | None, low: float, high: float) -> str:
    """A reward, between the colours of the least and the greatest around it."""
    share = (reward - low) / (high - low) if reward is not None and high > low else 0.5
    return f"<span class='chip {shade(2 * share - 1, 1.0) if high > low else ''}'>{told(reward)}</span>"


def shade(value: float | None, most: float) -> str:
    """The class whose colour says how far a value is from 0, either way; none for what is near it."""
    if value is None or value != value or most <= 0:
        return ""
    place = min(_SHADES, round(_SHADES * abs(value) / most))
    return f"{'p' if value > 0 else 'm'}{place}" if place else ""


def scale() -> str:
    """All shades, from least to greatest."""
    names = [f"m{n}" for n in range(_SHADES, 0, -1)] + [""] + [f"p{n}" for n in range(1, _SHADES + 1)]
    return "<span class='scale'>" + "".join(f"<i class='{name}'></i>" for name in names) + "</span>"


def push(value: float | None, most: float) -> str:
    """A bar to the right of what is raised, to the left of what is lowered."""
    width = 0.0 if value is None or not most > 0 else round(40 * min(1.0, abs(value) / most), 1)
    left = 42 if value is None or value >= 0 else 42 - width
    kind = "raise" if value is not None and value > 0 else "lower"
    return (
        f"<svg class='push' viewBox='0 0 84 12' aria-hidden='true'><rect class='{kind}' x='{left}' y='2' "
        f"width='{width}' height='8'/><line x1='42' x2='42' y1='0' y2='12'/></svg>"
    )


def tiles(facts: Iterable[tuple[str, str]]) -> str:
    """Names as text, values as HTML."""
    inside = "".join(f"<div><dt>{escape(name)}</dt><dd>{value}</dd></div>" for name, value in facts)
    return f"<dl class='tiles'>{inside}</dl>"


# --- links and tables -------------------------------------------------------------------------------------------------


def to_step(step: int | None, attempt: int | None = None) -> str:
    if not step:
        return told(step)
    of = f"?attempt={attempt}" if attempt is not None else ""
    return f"<a href='/step/{step}{of}'>{step:,}</a>"


def to_version(version: int | None, attempt: int | None = None) -> str:
    if version is None:
        return "–"
    return f"<a href='/version/{version}{'' if attempt is None else f'/{attempt}'}'>{version:,}</a>"


def to_trajectory(trajectory_id: str) -> str:
    return f"<a class='short' href='{address(trajectory_id)}'>{line(trajectory_id)}</a>"


def address(trajectory_id: str) -> str:
    return escape(f"/trajectory/{quote(trajectory_id)}")


def to_prompt(prompt_id: str) -> str:
    there = escape(urlencode({"id": prompt_id}, errors="replace"))
    css = "short" if len(prompt_id) <= _SHORT else ""
    return f"<a class='{css}' href='/prompt?{there}'>{line(prompt_id)}</a>"


def to_sql(query: str, text: str = "as SQL") -> str:
    flat = re.sub(r"\n\s*\n", "\n", query.strip())
    return f"<a href='/sql?{escape(urlencode({'query': flat}, errors='replace'))}'>{text}</a>"


def table(columns: Mapping[str, bool], rows: Iterable[Sequence[str]], classes: Sequence[str] = ()) -> str:
    """Of cells that are HTML; columns by name, and whether they are numbers."""
    numeric = [" class='n'" if is_number else "" for is_number in columns.values()]
    head = "".join(f"<th{n}>{escape(name)}</th>" for name, n in zip(columns, numeric, strict=True))
    body = ""
    for at, row in enumerate(rows):
        cells = "".join(f"<td{n}>{cell}</td>" for cell, n in zip(row, numeric, strict=True))
        body += f"<tr class='{classes[at] if at < len(classes) else ''}'>{cells}</tr>"
    return f"<div class='scroll'><table><tr>{head}</tr>{body}</table></div>"


_LINKS = {
    **dict.fromkeys(("step", "first_step", "last_step", "version_step"), to_step),
    **dict.fromkeys(("version", "version_start", "version_end"), to_version),
}


def cell(name: str, value: Any) -> str:
    """What a query found, with a link where its name says what it is."""
    if isinstance(value, int) and not isinstance(value, bool) and name in _LINKS:
        return _LINKS[name](value)
    if isinstance(value, str) and name == "trajectory_id" and re.fullmatch(r"\d+/\d+/\d+", value):
        return to_trajectory(value)
    if isinstance(value, str) and name == "prompt_id":
        return to_prompt(value)
    if isinstance(value, str):
        return f"<span class='said{' short' * (len(value) <= _SHORT)}'>{line(value, 300)}</span>"
    return told(value)


def answer(names: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> str:
    """The answer to somebody's query."""
    numeric = [any(isinstance(row[n], int | float) for row in rows) for n in range(len(names))]
    unique: dict[str, bool] = {}
    for name, is_number in zip(names, numeric, strict=True):
        while name in unique:
            name += " "
        unique[name] = is_number
    cells = [[cell(name, value) for name, value in zip(names, row, strict=True)] for row in rows]
    return table(unique, cells)
