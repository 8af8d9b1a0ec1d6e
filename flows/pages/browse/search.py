"""Trajectories chosen by a form, and what any query finds. The form is written out as the SQL that it stands for."""

import math
import re
from collections.abc import Mapping
from html import escape
from typing import Any
from urllib.parse import urlencode

from flows.escaping import line
from flows.pages.browse.components import address, answer, chip, frame, to_sql
from flows.pages.browse.session import Look, Refused
from flows.queries.statements import explain
from tba.errors import ConfigError, QueryError, QueryFailed

_A_PAGE = 50
_ROWS_A_PAGE = 200
_MOST_SEEN = 2_000  # characters of a text that is shown as a line

_ORDERS = {
    "newest": ("newest first", "created_at desc, trajectory_id"),
    "oldest": ("oldest first", "created_at, trajectory_id"),
    "highest": ("highest reward first", "reward desc, trajectory_id"),
    "lowest": ("lowest reward first", "reward, trajectory_id"),
    "longest": ("longest first", "length desc, trajectory_id"),
    "shortest": ("shortest first", "length, trajectory_id"),
    "drawn": ("most drawn first", "draws desc nulls last, trajectory_id"),
}
_YES_OR_NO = {"": "any", "yes": "yes", "no": "no"}
_PLACES = {"": "response", "prompt": "prompt", "both": "either"}
_BOUNDS = {
    "reward_from": "reward >= {}", "reward_to": "reward <= {}", "version_from": "version_start >= {}",
    "version_to": "version_start <= {}", "age_from": "age >= {}", "age_to": "age <= {}", "searcher": "searcher = {}",
    "length_from": "length >= {}", "length_to": "length <= {}",
}  # fmt: skip

_FOREIGN = "a link of another site wrote this: it runs once you have read it and press the button"

_NAME = re.compile(r"([0-9]+)/([0-9]+)/[0-9]+")  # of a trajectory

SELECTION = """
select trajectory_id, prompt, response, reward, length, finished, version_start, age, draws
from trajectories
left join (select trajectory_id, count(*) as draws from draws group by trajectory_id) using (trajectory_id)
{where}order by {order}
"""
CHOSEN = """
select trajectory_id, reward, finished, version_start, draws from ({query}
)
"""
TEXTS = """
select trajectory_id, left(prompt, {most}), left(response, {most}) from trajectories
where searcher in ({searchers}) and seq in ({seqs}) and trajectory_id in (select unnest(?))
"""
COUNT = """
select count(*), min(reward), max(reward)
from trajectories
left join (select trajectory_id, count(*) as draws from draws group by trajectory_id) using (trajectory_id)
{where}
"""

Form = Mapping[str, str]


def page(look: Look, form: Form, *, foreign: bool = False) -> str:
    """Chosen trajectories; a form that cannot be answered comes back with what is wrong with it."""
    found, wrong, query = "", "", ""
    try:
        if foreign and form.get("where", "").strip():
            raise Refused(_FOREIGN)
        where = conditions(form)
        query = SELECTION.format(where=where, order=_ORDERS[_order(form)][1]).strip()
        [(count, low, high)] = look.answer(COUNT.format(where=where), most=1).rows or [(0, None, None)]
        number = min(_page(form), max(0, count - 1) // _A_PAGE)
        rows = look.answer(CHOSEN.format(query=query), most=_A_PAGE, skip=number * _A_PAGE).rows
        hits = _hits(rows, _texts(look, [name for name, *_ in rows]), low, high)
        found = _counted(count, number, form) + hits + _pages(form, number, count)
    except QueryFailed as error:
        wrong = explain(error)
    except (QueryError, ConfigError) as error:
        wrong = str(error)
    here = f"/trajectories?{_encoded(form)}" if form else "/trajectories"
    as_sql = (
        "<details open><summary class='faint'>The same in SQL</summary><form class='find' action='/sql'>"
        "<label class='wide'>a query over the view trajectories"
        f"<textarea name='query' rows='8' spellcheck='false'>{escape(query)}</textarea></label>"
        "<button>Run it</button></form></details>"
        if query
        else ""
    )
    return frame(look, here, "trajectories", ["<h1>Trajectories</h1>", _form(form, wrong), as_sql, found])


def sql_page(look: Look, form: Form, *, foreign: bool = False) -> str:
    """Any query, with links where a column is named like something that has a page."""
    query = form.get("query", "")
    found, wrong = "", ""
    try:
        if foreign and query.strip():
            raise Refused(_FOREIGN)
        if query.strip():
            number = _page(form)
            table = look.answer(query, most=_ROWS_A_PAGE + 1, skip=number * _ROWS_A_PAGE)
            rows, more = table.rows[:_ROWS_A_PAGE], len(table.rows) > _ROWS_A_PAGE
            first = number * _ROWS_A_PAGE
            counted = f"rows {first + 1:,} to {first + len(rows):,}" if rows else "no rows"
            links = _links("/sql", form, number, more)
            found = f"<p class='note'>{counted}</p>{answer(table.columns, rows)}{links}"
    except QueryFailed as error:
        wrong = explain(error)
    except QueryError as error:
        wrong = str(error)
    lines = min(16, max(5, query.count("\n") + 2))
    box = (
        "<form class='find' action='/sql'><label class='wide'>one query that reads"
        f"<textarea name='query' rows='{lines}' autofocus spellcheck='false'>\n{escape(_plain(query))}</textarea>"
        f"</label>{_wrong(wrong)}<button>Run</button></form>"
    )
    help = to_sql("from help()", "what there is to ask")
    about = to_sql("from help('draws')", "help('draws')")
    lead = (
        f"<p class='lead'>{help}: views and macros; {about} explains one. The dialect is DuckDB's. Columns named "
        "trajectory_id, step, version or prompt_id become links.</p>"
    )
    here = f"/sql?{_encoded(form)}" if form else "/sql"
    return frame(look, here, "SQL", ["<h1>SQL</h1>", lead, box, found])


def _texts(look: Look, names: list[str]) -> dict[str, tuple[str, str]]:
    """Prompt and response of these trajectories. Only their shards are opened for that: all texts of a run are long."""
    found = [part.groups() for name in names if (part := _NAME.fullmatch(name))]
    if not found:
        return {}
    searchers, seqs = (", ".join(sorted(set(of))) for of in zip(*found, strict=True))
    rows = look.ask(TEXTS.format(searchers=searchers, seqs=seqs, most=_MOST_SEEN), [names]).rows
    return {name: (prompt or "", response or "") for name, prompt, response in rows}


def conditions(form: Form) -> str:
    """A form as the SQL of its conditions; ConfigError names a field that cannot be one."""
    terms: list[str] = []
    if words := form.get("text", ""):
        terms.append(_contains(words, form.get("in", "")))
    for name, term in _BOUNDS.items():
        if given := form.get(name, "").strip():
            terms.append(term.format(_number(name, given)))
    for name, term in (("finished", "finished"), ("drawn", "draws is not null")):
        if form.get(name) in ("yes", "no"):
            terms.append(term if form[name] == "yes" else f"not ({term})")
    if written := form.get("where", "").strip():
        terms.append(f"({_plain(written)}\n)")
    together = "\n  and ".join(terms)
    return f"where {together}\n" if terms else ""


def _contains(words: str, place: str) -> str:
    literal = _plain(words).lower().replace("'", "''")
    found = {name: f"contains(lower({name}), '{literal}')" for name in ("prompt", "response")}
    return f"({found['prompt']} or {found['response']})" if place == "both" else found[place or "response"]


def _number(name: str, given: str) -> str:
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{name.replace('_', ' ')}: a number, got {given!r}")
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)


def _plain(text: str) -> str:
    return text.replace("\0", "")


def _order(form: Form) -> str:
    order = form.get("order") or "newest"
    if order not in _ORDERS or form.get("in", "") not in _PLACES:
        raise ConfigError("order or in: none of those that the form offers")
    return order


def _page(form: Form) -> int:
    given = form.get("page") or "0"
    if not (given.isascii() and given.isdigit() and len(given) < 8):
        raise ConfigError(f"page: a number from 0, got {given!r}")
    return int(given)


def _encoded(form: Form) -> str:
    return urlencode({name: value for name, value in form.items() if value}, errors="replace")


# --- what is seen -----------------------------------------------------------------------------------------------------


def _form(form: Form, wrong: str) -> str:
    return (
        "<form class='find' action='/trajectories'>"
        f"<label>text<input name='text' value='{_value(form, 'text')}'></label>"
        f"{_select('in', 'in', _PLACES, form)}"
        f"{_pair('reward', form)}{_pair('version', form)}{_pair('age', form)}{_pair('length', form)}"
        f"<label>searcher<input name='searcher' inputmode='numeric' value='{_value(form, 'searcher')}'></label>"
        f"{_select('drawn', 'drawn by a step', _YES_OR_NO, form)}"
        f"{_select('finished', 'finished', _YES_OR_NO, form)}"
        f"{_select('order', 'order', {name: text for name, (text, _) in _ORDERS.items()}, form)}"
        "<label class='wide'><span>and a condition in SQL, such as <code>step > 9 and prompt like '%12%'</code></span>"
        f"<input class='sql' name='where' spellcheck='false' value='{_value(form, 'where')}'></label>"
        f"{_wrong(wrong)}<button>Find</button></form>"
    )


def _wrong(message: str) -> str:
    return f"<p class='wrong wide' role='alert'>{line(message, 2000)}</p>" if message else ""


def _value(form: Form, name: str) -> str:
    return escape(_plain(form.get(name, "")))


def _pair(name: str, form: Form) -> str:
    first, last = f"{name}_from", f"{name}_to"
    return (
        f"<label>{name}, from – to<span class='pair'>"
        f"<input name='{first}' inputmode='decimal' aria-label='{name} from' value='{_value(form, first)}'>"
        f"<input name='{last}' inputmode='decimal' aria-label='{name} to' value='{_value(form, last)}'></span></label>"
    )


def _select(name: str, label: str, options: Mapping[str, str], form: Form) -> str:
    inside = "".join(
        f"<option value='{value}'{' selected' if form.get(name, '') == value else ''}>{text}</option>"
        for value, text in options.items()
    )
    return f"<label>{label}<select name='{name}'>{inside}</select></label>"


def _counted(count: int, page: int, form: Form) -> str:
    first, last = page * _A_PAGE + 1, min(count, (page + 1) * _A_PAGE)
    shown = f", {first:,} to {last:,} here" if count > _A_PAGE else ""
    return f"<p class='note'>{count:,} trajector{'y' if count == 1 else 'ies'}{shown}</p>"


def _hits(rows: list[tuple[Any, ...]], texts: Mapping[str, tuple[str, str]], low: float, high: float) -> str:
    inside = "".join(
        f"<li><a href='{address(name)}'>{chip(reward, low, high)}"
        f"<span class='one'><span class='faint said'>{line(prompt, 90)}</span> "
        f"<b class='said'>{line(response, 120)}</b></span>"
        f"<span class='facts'>version {version} · {_times(draws)}{'' if finished else ' · cut off'}</span></a></li>"
        for name, reward, finished, version, draws in rows
        for prompt, response in [texts.get(name, ("", ""))]
    )
    return f"<ol class='hits'>{inside}</ol>" if rows else ""


def _times(draws: int | None) -> str:
    return "never drawn" if not draws else "drawn once" if draws == 1 else f"drawn {draws:,} times"


def _pages(form: Form, page: int, count: int) -> str:
    return _links("/trajectories", form, page, (page + 1) * _A_PAGE < count)


def _links(path: str, form: Form, page: int, more: bool) -> str:
    def link(number: int, text: str) -> str:
        return f"<a href='{path}?{escape(_encoded({**form, 'page': str(number)}))}'>{text}</a>"

    back = link(page - 1, "← before") if page else "<span></span>"
    return f"<nav class='pages'>{back}{link(page + 1, 'after →') if more else '<span></span>'}</nav>"
