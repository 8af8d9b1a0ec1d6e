"""A sample of trajectories to read in a report, from syncs spread over the run, with high and low rewards."""

from typing import Any

import duckdb
from markupsafe import Markup

from flows.pages.rendering import render
from flows.pages.tables import ask
from flows.pages.values import number

_SYNCS, _OF_EACH = 32, 4  # syncs; trajectories of each sync with higher rewards, and as many with lower ones
_MOST_CHARACTERS = 6000  # of a text
_ORDERS = {
    "newest": "newest first", "oldest": "oldest first", "highest": "highest reward first",
    "lowest": "lowest reward first", "longest": "longest first", "drawn": "most drawn first",
}  # fmt: skip
_CHOICES = {
    "all": "all", "high": "higher rewards", "low": "lower rewards", "drawn": "drawn",
    "never": "never drawn",
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


def section(con: duckdb.DuckDBPyConnection) -> Markup:
    """Return the section of the report; empty text before the first sync."""
    syncs = [sync for (sync,) in con.execute(SYNCS, {"syncs": _SYNCS}).fetchall()]
    if not syncs:
        return Markup()
    among = ", ".join(map(str, syncs))  # numbers, so that only their shards are read
    # The choice is made without texts: the texts of all trajectories of these syncs may not fit into memory.
    chosen = ask(con, CHOSEN.format(syncs=among, of_each=_OF_EACH))
    samples = ask(con, SAMPLE.format(syncs=among), {"chosen": chosen.column("trajectory_id")}).records()
    rewards = [it["reward"] for it in samples]
    return render(
        "report/samples.html",
        samples=[{**it, "facts": _facts(it)} for it in samples],
        syncs=len(syncs),
        middle=chosen.column("middle")[0],
        lowest=min(rewards),
        highest=max(rewards),
        choices=_CHOICES,
        orders=_ORDERS,
        most=_MOST_CHARACTERS,
    )


def _facts(it: dict[str, Any]) -> list[str]:
    versions = sorted({it["version_start"], it["version_end"]})
    facts = [
        it["trajectory_id"],
        f"searcher {it['searcher']}",
        f"version{'s' if len(versions) > 1 else ''} {' to '.join(map(str, versions))}",
        f"entered at sync {it['sync']:,}" + ("" if it["age"] is None else f", {it['age']:,} steps old"),
        f"{it['length']:,} tokens{'' if it['finished'] else ', cut off'}",
    ]
    if it["log_ratio"] is not None:
        facts.append(f"log-ratio {number(it['log_ratio'])}")
    if it["draws"]:
        once = it["first_step"] == it["last_step"]
        facts.append(f"drawn by step {it['first_step']:,}" + ("" if once else f" to {it['last_step']:,}"))
    parts = it["reward_parts"] or {}
    return facts + [f"{name} {number(value)}" for name, value in parts.items() if value is not None]
