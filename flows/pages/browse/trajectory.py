"""The page of one trajectory: its tokens, the rewards of its group, and the steps that learned from it."""

from collections import Counter
from typing import Any

from markupsafe import Markup

from flows.pages import addresses
from flows.pages.browse.frame import show
from flows.pages.browse.response import Tokens, log_ratios, read_response
from flows.pages.browse.run_snapshot import Refused, RunSnapshot
from flows.pages.tables import Fact, facts
from storage import layout

_MOST_PARTS = 8  # of a reward

TRAJECTORY = """
select * from trajectories
where searcher = {searcher} and seq = {seq} and trajectory_id = '{searcher}/{seq}/{row}'
"""
GROUP = """
select trajectory_id, left(response, 2000) as response, reward, length, finished from trajectories
where searcher = {searcher} and seq = {seq} and group_id = ? order by slot
"""
DRAWS = """
select * from draws_all where trajectory_id = '{searcher}/{seq}/{row}' and sync >= {since} order by step, slot, position
"""
RESIDUALS = """
select trajectory_id, count(*) as draws, last(residual order by step) as residual,
    last(advantage order by step) as advantage
from draws where trajectory_id in (select unnest(?)) and sync >= {since} group by 1
"""
_NOT_DRAWN = {"draws": 0, "advantage": None, "residual": None}


def page(snapshot: RunSnapshot, tokens: Tokens, searcher: int, seq: int, row: int) -> Markup:
    place = {"searcher": searcher, "seq": seq, "row": row}
    found = snapshot.rows(TRAJECTORY.format(**place))
    if not found:
        raise Refused(f"there is no trajectory {searcher}/{seq}/{row}")
    it = found[0]
    since = it["sync"] if it["sync"] is not None else 0
    draws = snapshot.rows(DRAWS.format(**place, since=since))
    group = snapshot.rows(GROUP.format(**place), [it["group_id"]])
    names = [other["trajectory_id"] for other in group]
    last = {row["trajectory_id"]: row for row in snapshot.rows(RESIDUALS.format(since=since), [names])}
    rewards = [other["reward"] for other in group]
    times = Counter((draw["step"], draw["attempt"]) for draw in draws)
    return show(
        snapshot,
        addresses.trajectory(it["trajectory_id"]),
        "trajectory.html",
        it=it,
        imported=it["searcher"] >= layout.IMPORTS,
        query=f"from trajectory('{it['trajectory_id']}')",
        answers=snapshot.rows("select answer from prompts where split = 'train' and prompt_id = ?", [it["prompt_id"]]),
        learned=_learned([draw for draw in draws if not draw["abandoned"]]),
        facts=_facts(it, draws),
        tokens=read_response(it, tokens),
        draws=[(draw, times[key]) for key, draw in {(draw["step"], draw["attempt"]): draw for draw in draws}.items()],
        group=[(other, last.get(other["trajectory_id"], _NOT_DRAWN)) for other in group],
        lowest=min(rewards, default=0.0),
        highest=max(rewards, default=0.0),
    )


def _learned(draws: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the template values about the steps that learned from a trajectory: their number, the first and the last,
    the draws, and the sum of the trajectory's advantages. Return None if no step learned from it."""
    steps = sorted({draw["step"] for draw in draws})
    if not steps:
        return None
    advantages = [draw["advantage"] for draw in draws if draw["advantage"] is not None]
    return {
        "steps": len(steps),
        "first": steps[0],
        "last": steps[-1],
        "draws": len(draws),
        "advantage": sum(advantages) if advantages else None,
    }


def _facts(it: dict[str, Any], draws: list[dict[str, Any]]) -> list[Fact]:
    told = facts([("reward", it["reward"]), *list((it["reward_parts"] or {}).items())[:_MOST_PARTS]])
    told.append(Fact("tokens", f"{it['length']:,}{'' if it['finished'] else ', cut off'}"))
    if ratios := log_ratios(it):
        told.append(Fact("log-ratio of all tokens", sum(ratios), is_signed=True))
    drawn = sum(not draw["abandoned"] for draw in draws)
    return told + facts([("draws", drawn), ("top-p", it["top_p"]), ("seconds to generate", it["generate_seconds"])])
