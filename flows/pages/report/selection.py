"""The report's section on what was chosen to learn from: does the choice look at length, reward, age or prompt?"""

from typing import Any

import duckdb

from flows.pages.charts import Series, line_chart
from flows.pages.html import Table, ask, charts, table_of

_MEASURES = {"length": "tokens", "reward": "reward", "age": "steps"}
_LEAST_SHARE = 0.005  # of responses in a bin; of fewer the rates say little and would set the scale
_STANDARD_ERRORS, _SPREADS = 5.0, 0.1  # from both of which on a difference is marked

_ABOUT = """\
From what was generated to what was learned from: <b>eligible</b> is what some step could have drawn, after
de-duplication and capacity; <b>trained</b> what was drawn at least once; <b>drawn</b> counts each as often as it was
drawn. The first charts show how often, relative to all that entered at the same sync: 1 everywhere, within the band of
two standard errors, if the choice does not look at the measure."""

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


def section(con: duckdb.DuckDBPyConnection) -> str:
    """Charts and tables; empty text before the first step. The view is computed once for all that is asked of it."""
    con.execute("create or replace temp table selection as from selection")
    if not ask(con, "select 1 from selection where draws > 0 limit 1").rows:
        return ""
    drawn = [_by(con, measure, unit) for measure, unit in _MEASURES.items()] + [_prompts(ask(con, USE_OF_PROMPTS))]
    return (
        charts("Selection", drawn, _ABOUT)
        + _compared(ask(con, COMPARED))
        + f"<h3>Prompts</h3>{table_of(ask(con, PROMPTS))}"
    )


def _by(con: duckdb.DuckDBPyConnection, measure: str, unit: str) -> str:
    rows = con.execute(BY_MEASURE, [measure, _LEAST_SHARE]).fetchall()
    if len(rows) < 2:
        return ""
    eligible = Series("eligible", [(mean, rate) for mean, rate, _, _ in rows], marked=True)
    errors = [2 * error for _, _, _, error in rows]
    drawn = Series("drawn", [(mean, rate) for mean, _, rate, _ in rows], marked=True, errors=errors)
    return line_chart(f"How often, by {measure}", [eligible, drawn], x_name=unit, level=1.0, room=0.5)


def _prompts(use: Table) -> str:
    lines = [
        Series(name, [(0.0, 0.0), *((x, y) for it, x, y in use.rows if it == name)])
        for name in ("eligible", "drawn", "generated")
    ]
    note = "The least used prompts first: evenly used ones make a straight line."
    return line_chart("Share of uses, by share of prompts", lines, x_name="prompts", note=note)


def _compared(table: Table) -> str:
    """Rows that stand out are marked: neither chance nor too small to matter."""
    spread = {it["measure"]: it["std"] for it in _records(table) if it["set"] == "generated"}
    marks = ["warning" if _stands_out(it, spread[it["measure"]]) else "" for it in _records(table)]
    verdict = "Marked differences are" if any(marks) else "No difference is"
    return (
        f"<h3>Measures</h3>{table_of(table, marks)}<p class='note'>Differences are from all that entered at the same "
        f"sync. {verdict} at least {_STANDARD_ERRORS:g} standard errors and {_SPREADS:g} standard deviations of what "
        "was generated. De-duplication alone lowers the reward of a policy that is often right in the same words.</p>"
    )


def _records(table: Table) -> list[dict[str, Any]]:
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def _stands_out(row: dict[str, Any], spread: float) -> bool:
    errors = row["standard_errors"]
    return errors is not None and abs(errors) >= _STANDARD_ERRORS and abs(row["difference"]) >= _SPREADS * spread
