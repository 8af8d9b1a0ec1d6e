"""The report's trajectories to read: some of those that entered at syncs all along the run, high rewards and low."""

from typing import Any

import duckdb

from flows.escaping import line, shown
from flows.pages.charts import number
from flows.pages.html import ask, heading

_SYNCS, _OF_EACH = 32, 4  # how many syncs, and of each so many of the higher and of the lower rewards
_MOST_CHARACTERS = 6000  # of a text
_ORDERS = {
    "newest": "newest first", "oldest": "oldest first", "highest": "highest reward first",
    "lowest": "lowest reward first", "longest": "longest first", "drawn": "most drawn first",
}  # fmt: skip
_CHOICES = {
    "all": "all", "high": "higher rewards", "low": "lower rewards", "drawn": "that were drawn",
    "never": "that were never drawn",
}  # fmt: skip

SYNCS = """
with entered as (select sync, ntile($syncs) over (order by sync) as part from syncs where rows > 0)
select max(sync) from entered group by part order by part
"""

CHOSEN = """
with seen as (
    select trajectory_id, sync, reward, (min(reward) over () + max(reward) over ()) / 2 as middle
    from trajectories where sync in ({syncs})
)
select trajectory_id, middle from seen
qualify row_number() over (partition by sync, reward > middle order by hash(trajectory_id)) <= {of_each}
"""

SAMPLE = """
with drawn as (
    select trajectory_id, count(*) as draws, min(step) as first_step, max(step) as last_step
    from draws where trajectory_id in (select unnest($chosen)) group by 1
)
select
  trajectory_id, searcher, version_start, version_end, sync, step, age, prompt, response, reward, length,
  finished, reward_parts, list_sum(behaviour_logps) - list_sum(ref_logps) as log_ratio,
  coalesce(draws, 0) as draws, first_step, last_step
from trajectories left join drawn using (trajectory_id)
where sync in ({syncs}) and trajectory_id in (select unnest($chosen))
order by step desc, trajectory_id
"""


def section(con: duckdb.DuckDBPyConnection) -> str:
    """A list that can be searched where scripts run; empty text before the first sync."""
    syncs = [sync for (sync,) in con.execute(SYNCS, {"syncs": _SYNCS}).fetchall()]
    if not syncs:
        return ""
    among = ", ".join(map(str, syncs))  # numbers, so that only their shards are read
    # First without texts: those of all that entered there may be more than memory holds.
    chosen = ask(con, CHOSEN.format(syncs=among, of_each=_OF_EACH))
    table = ask(con, SAMPLE.format(syncs=among), {"chosen": chosen.column("trajectory_id")})
    samples = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    rewards = [it["reward"] for it in samples]
    listed = "".join(_sample(it, min(rewards), max(rewards)) for it in samples)
    return (
        f"<section>{heading('Trajectories')}"
        f"<p class='note'>{len(samples)} of those that entered at {len(syncs)} syncs all along the run; as many of "
        "higher and of lower rewards where there are. The log-ratio is that of the response when it was generated, "
        "log π − log π_ref.</p>"
        "<div class='controls' hidden><input id='words' type='search' placeholder='search in texts and facts' "
        f"aria-label='search'>{_select('which', _CHOICES)}{_select('order', _ORDERS)}<span id='found'></span></div>"
        f"<div id='samples' data-middle='{chosen.column('middle')[0]!r}'>{listed}</div></section>"
    )


def _select(name: str, options: dict[str, str]) -> str:
    inside = "".join(f"<option value='{value}'>{text}</option>" for value, text in options.items())
    return f"<select id='{name}' aria-label='{name}'>{inside}</select>"


def _sample(it: dict[str, Any], low: float, high: float) -> str:
    share = (it["reward"] - low) / (high - low) if high > low else 1.0
    drawn = f"drawn {it['draws']:,} times" if it["draws"] else "never drawn"
    return (
        f"<details class='sample' data-step='{it['step']}' data-reward='{it['reward']!r}' "
        f"data-length='{it['length']}' data-draws='{it['draws']}'>"
        f"<summary><span class='reward' style='--share:{share:.0%}'>{number(it['reward'])}</span>"
        f"<span class='line'>{line(it['prompt'])} <b>{line(it['response'])}</b></span>"
        f"<span class='facts'>step {it['step']:,} · {drawn}</span></summary>"
        f"<pre>{shown(it['prompt'], _MOST_CHARACTERS)}</pre>"
        f"<pre class='response'>{shown(it['response'], _MOST_CHARACTERS)}</pre>"
        f"<p class='note'>{line(' · '.join(_facts(it)), _MOST_CHARACTERS)}</p></details>"
    )


def _facts(it: dict[str, Any]) -> list[str]:
    versions = sorted({it["version_start"], it["version_end"]})
    facts = [
        it["trajectory_id"],
        f"searcher {it['searcher']}",
        f"version{'s' if len(versions) > 1 else ''} {' to '.join(map(str, versions))}",
        f"entered at sync {it['sync']:,}" + ("" if it["age"] is None else f", aged {it['age']:,} steps"),
        f"{it['length']:,} tokens{'' if it['finished'] else ', cut off'}",
    ]
    if it["log_ratio"] is not None:
        facts.append(f"log-ratio {number(it['log_ratio'])}")
    if it["draws"]:
        once = it["first_step"] == it["last_step"]
        facts.append(f"drawn by step {it['first_step']:,}" + ("" if once else f" to {it['last_step']:,}"))
    parts = it["reward_parts"] or {}
    return facts + [f"{name} {number(value)}" for name, value in parts.items() if value is not None]
