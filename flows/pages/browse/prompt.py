"""The page of one prompt: all responses to it, version by version, and the steps that drew them."""

from typing import Any

from markupsafe import Markup

from flows.pages import addresses
from flows.pages.browse.frame import show
from flows.pages.browse.run_snapshot import Refused, RunSnapshot
from flows.pages.charts import Chart, Series
from flows.pages.tables import Fact, facts
from flows.pages.values import written

_MOST = 200  # responses on the page

PROMPT = "select * from prompts where prompt_id = ? order by split desc"
RESPONSES = """
with drawn as (
    select trajectory_id, count(*) as draws, min(step) as first_step, max(step) as last_step
    from draws where prompt_id = ? group by 1
)
select trajectory_id, response, reward, length, finished, version_start, version_start_attempt, version_step, draws,
    first_step, last_step
from trajectories left join drawn using (trajectory_id) where prompt_id = ?
order by created_at desc, trajectory_id
"""


def page(snapshot: RunSnapshot, prompt_id: str) -> Markup:
    texts, responses = snapshot.rows(PROMPT, [prompt_id]), snapshot.rows(RESPONSES, [prompt_id, prompt_id])
    if not texts and not responses:
        raise Refused("there is no prompt with this id")
    literal = "'" + prompt_id.replace("'", "''") + "'"
    rewards = [it["reward"] for it in responses]
    return show(
        snapshot,
        addresses.prompt(prompt_id),
        "prompt.html",
        id=prompt_id,
        query=f"select * from trajectories where prompt_id = {literal}",
        texts=texts,
        facts=_facts(responses, rewards) if responses else [],
        chart=_chart(responses),
        responses=responses[:_MOST],
        count=len(responses),
        lowest=min(rewards, default=0.0),
        highest=max(rewards, default=0.0),
    )


def _facts(responses: list[dict[str, Any]], rewards: list[float]) -> list[Fact]:
    return facts(
        [
            ("responses", len(responses)),
            ("different responses", len({it["response"] for it in responses})),
            ("mean reward", sum(rewards) / len(rewards)),
            ("lowest and highest reward", f"{written(min(rewards))} and {written(max(rewards))}"),
            ("draws", sum(it["draws"] or 0 for it in responses)),
            ("never drawn", sum(not it["draws"] for it in responses)),
        ]
    )


def _chart(responses: list[dict[str, Any]]) -> Markup:
    """Return a chart of the mean reward by version; empty text if all responses are of one version."""
    by_version: dict[int, list[float]] = {}
    for it in responses:
        by_version.setdefault(it["version_start"], []).append(it["reward"])
    points = [(float(version), sum(of) / len(of)) for version, of in sorted(by_version.items())]
    series = [Series("reward", points, marked=True)]
    return Chart("Mean reward", series, x_name="version").figure() if len(points) > 1 else Markup()
