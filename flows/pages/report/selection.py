"""The section of a report about selection: does a draw depend on length, reward, age or prompt of a trajectory?"""

from typing import Any

import duckdb
from markupsafe import Markup

from flows.pages.charts import Chart, Series
from flows.pages.rendering import render
from flows.pages.tables import Table, ask

_MEASURES = {"length": "tokens", "reward": "reward", "age": "steps"}
_LEAST_SHARE = 0.005  # of responses in a bin; the rates of smaller bins say little and would set the scale
_STANDARD_ERRORS, _SPREADS = 5.0, 0.1  # a difference is marked if it reaches both

COMPARED = "select * from compare_selection()"
BY_MEASURE = """
select mean, eligible_rate, draw_rate, draw_rate_error from selection_by(?)
where generated >= ? * (select count(*) from selection) and eligible_rate is not null and draw_rate is not null
"""
PROMPTS = "select * from prompts_by_set()"

USE_OF_PROMPTS = """
with
  used as (
    select prompt_id, count(*) as generated, count(*) filter (eligible) as eligible, sum(draws) as drawn
    from selection group by prompt_id
  ),
  ranked as (
    select
      set, n, row_number() over w as rank, sum(n) over (w rows unbounded preceding) as running,
      count(*) over (partition by set) as prompts, sum(n) over (partition by set) as total
    from (unpivot used on generated, eligible, drawn into name set value n) window w as (partition by set order by n)
  )
select set, max(rank / prompts) as prompts, max(running / total) as uses
from ranked group by set, ceil(40 * rank / prompts) having sum(total) > 0 order by set, prompts
"""


def section(con: duckdb.DuckDBPyConnection) -> Markup:
    """Return the section of the report; empty text before the first step. The view `selection` is computed once for all
    queries of the section."""
    con.execute("create or replace temp table selection as from selection")
    if not ask(con, "select 1 from selection where draws > 0 limit 1").rows:
        return Markup()
    compared = ask(con, COMPARED)
    return render(
        "report/selection.html",
        drawn=[*(_by(con, measure, unit) for measure, unit in _MEASURES.items()), _prompts(ask(con, USE_OF_PROMPTS))],
        compared=compared,
        marks=_marks(compared),
        standard_errors=_STANDARD_ERRORS,
        spreads=_SPREADS,
        prompts=ask(con, PROMPTS),
    )


def _by(con: duckdb.DuckDBPyConnection, measure: str, unit: str) -> Markup:
    rows = con.execute(BY_MEASURE, [measure, _LEAST_SHARE]).fetchall()
    if len(rows) < 2:
        return Markup()
    eligible = Series("eligible", [(mean, rate) for mean, rate, _, _ in rows], marked=True)
    errors = [2 * error for _, _, _, error in rows]
    drawn = Series("drawn", [(mean, rate) for mean, _, rate, _ in rows], marked=True, errors=errors)
    return Chart(f"Relative frequency by {measure}", [eligible, drawn], x_name=unit, level=1.0, room=0.5).figure()


def _prompts(use: Table) -> Markup:
    lines = [
        Series(name, [(0.0, 0.0), *((x, y) for it, x, y in use.rows if it == name)])
        for name in ("eligible", "drawn", "generated")
    ]
    note = "The least used prompts come first. If all prompts are used evenly, the line is straight."
    return Chart("Share of uses, by share of prompts", lines, x_name="prompts", note=note).figure()


def _marks(table: Table) -> list[str]:
    """Return the style sheet class of each row. A marked difference is neither chance nor too small to matter."""
    rows = table.records()
    spread = {it["measure"]: it["std"] for it in rows if it["set"] == "generated"}
    return ["warning" if _stands_out(it, spread[it["measure"]]) else "" for it in rows]


def _stands_out(row: dict[str, Any], spread: float) -> bool:
    errors = row["standard_errors"]
    return errors is not None and abs(errors) >= _STANDARD_ERRORS and abs(row["difference"]) >= _SPREADS * spread
