"""The page that finds trajectories by a form, and the page that answers any query. The form also appears as SQL."""

import math
import re
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from flows.pages import addresses
from flows.pages.browse.frame import show
from flows.pages.browse.run_snapshot import Refused, RunSnapshot
from flows.pages.tables import Table
from flows.queries.statements import explain
from tba.errors import ConfigError, QueryError, QueryFailed

_A_PAGE = 50
_ROWS_A_PAGE = 200
_MOST_SEEN = 2_000  # characters of a text that is shown in one line

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

_FIELDS = ("text", "in", *_BOUNDS, "drawn", "finished", "order", "where")

_FOREIGN = "this SQL comes from a link on another site; read the SQL, then press the button to run it"

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


def page(snapshot: RunSnapshot, form: Form, *, foreign: bool = False) -> Markup:
    """Return the page of chosen trajectories. A form that cannot be answered is shown with its error."""
    hits, problem, query = None, "", ""
    try:
        if foreign and form.get("where", "").strip():
            raise Refused(_FOREIGN)
        where = conditions(form)
        query = SELECTION.format(where=where, order=_ORDERS[_order(form)][1]).strip()
        hits = _find(snapshot, form, where, query)
    except QueryFailed as error:
        problem = explain(error)
    except (QueryError, ConfigError) as error:
        problem = str(error)
    return show(
        snapshot,
        addresses.with_query("/trajectories", form),
        "trajectories.html",
        form={name: _plain(form.get(name, "")) for name in _FIELDS},
        places=_PLACES,
        yes_or_no=_YES_OR_NO,
        orders={name: text for name, (text, _) in _ORDERS.items()},
        problem=problem,
        query=query,
        hits=hits,
    )


def sql_page(snapshot: RunSnapshot, form: Form, *, foreign: bool = False) -> Markup:
    """Return the page that answers a query, with links in columns whose names belong to a kind of page."""
    query, page, problem = form.get("query", ""), 0, ""
    answer: Table | None = None
    has_more = False
    try:
        if foreign and query.strip():
            raise Refused(_FOREIGN)
        if query.strip():
            page = _page(form)
            answer = snapshot.answer(query, most=_ROWS_A_PAGE + 1, skip=page * _ROWS_A_PAGE)
            has_more = len(answer.rows) > _ROWS_A_PAGE
            answer.rows[_ROWS_A_PAGE:] = []
    except QueryFailed as error:
        problem = explain(error)
    except (QueryError, ConfigError) as error:
        problem = str(error)
    before, after = _around("/sql", form, page, has_more)
    return show(
        snapshot,
        addresses.with_query("/sql", form),
        "sql.html",
        query=_plain(query),
        lines=min(16, max(5, query.count("\n") + 2)),
        problem=problem,
        answer=answer,
        first=page * _ROWS_A_PAGE,
        before=before,
        after=after,
    )


def _find(snapshot: RunSnapshot, form: Form, where: str, query: str) -> dict[str, Any]:
    """Return the template values of one page of the chosen trajectories: its rows, the number and the reward range of
    all chosen trajectories, and the addresses of the pages around it."""
    [(count, lowest, highest)] = snapshot.answer(COUNT.format(where=where), most=1).rows or [(0, None, None)]
    page = min(_page(form), max(0, count - 1) // _A_PAGE)
    rows = snapshot.answer(CHOSEN.format(query=query), most=_A_PAGE, skip=page * _A_PAGE).rows
    texts = read_texts(snapshot, [name for name, *_ in rows])
    names = ("id", "reward", "finished", "version", "draws", "prompt", "response")
    before, after = _around("/trajectories", form, page, (page + 1) * _A_PAGE < count)
    return {
        "count": count,
        "lowest": lowest,
        "highest": highest,
        "first": page * _A_PAGE + 1,
        "shown": [dict(zip(names, (*row, *texts.get(row[0], ("", ""))), strict=True)) for row in rows],
        "before": before,
        "after": after,
    }


def _around(path: str, form: Form, page: int, has_more: bool) -> tuple[str, str]:
    """Return the addresses of the page before and of the page after; empty where there is none."""
    before = addresses.with_query(path, {**form, "page": str(page - 1)}) if page else ""
    return before, addresses.with_query(path, {**form, "page": str(page + 1)}) if has_more else ""


def read_texts(snapshot: RunSnapshot, names: list[str]) -> dict[str, tuple[str, str]]:
    """Return prompt and response of these trajectories. Only the shards of these trajectories are opened, because all
    texts of a run together may be large."""
    found = [part.groups() for name in names if (part := _NAME.fullmatch(name))]
    if not found:
        return {}
    searchers, seqs = (", ".join(sorted(set(of))) for of in zip(*found, strict=True))
    rows = snapshot.ask(TEXTS.format(searchers=searchers, seqs=seqs, most=_MOST_SEEN), [names]).rows
    return {name: (prompt or "", response or "") for name, prompt, response in rows}


def conditions(form: Form) -> str:
    """Return the conditions of a form as a `where` clause of SQL; empty if the form has none. Raise ConfigError, which
    names the field, if a number is malformed or the place of the text is unknown."""
    terms: list[str] = []
    if words := form.get("text", ""):
        terms.append(_contains(words, _option("in", form.get("in", ""), _PLACES)))
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
        raise ConfigError(f"{name.replace('_', ' ')} must be a number, got {given!r}")
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)


def _plain(text: str) -> str:
    return text.replace("\0", "")


def _option(name: str, given: str, options: Mapping[str, Any]) -> str:
    if given not in options:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, options))}, got {given!r}")
    return given


def _order(form: Form) -> str:
    return _option("order", form.get("order") or "newest", _ORDERS)


def _page(form: Form) -> int:
    given = form.get("page") or "0"
    if not (given.isascii() and given.isdigit() and len(given) < 8):
        raise ConfigError(f"page must be a whole number from 0, got {given!r}")
    return int(given)
