"""One prompt: all that was answered to it, version by version, and what steps made of that."""

from typing import Any
from urllib.parse import urlencode

from flows.escaping import line, shown
from flows.pages.browse.components import address, chip, frame, table, tiles, to_sql, to_step, to_version, told
from flows.pages.browse.session import Look, Refused
from flows.pages.charts import Series, line_chart
from flows.pages.html import heading

_MOST = 200

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


def page(look: Look, prompt_id: str) -> str:
    asked, responses = look.rows(PROMPT, [prompt_id]), look.rows(RESPONSES, [prompt_id, prompt_id])
    if not asked and not responses:
        raise Refused("there is no prompt of this name")
    texts = "".join(
        f"<pre class='text'>{shown(it['text'])}</pre><p class='note'>of split {line(it['split'])}; the task compares "
        f"with <q>{line(it['answer'] or '', 120)}</q></p>"
        for it in asked
    )
    literal = "'" + prompt_id.replace("'", "''") + "'"
    query = to_sql(f"select * from trajectories where prompt_id = {literal}")
    return frame(
        look,
        to_here(prompt_id),
        f"prompt {prompt_id}",
        [
            f"<div class='title'><h1>Prompt {line(prompt_id)}</h1><span class='around'>{query}</span></div><br>{texts}",
            _tiles(responses),
            _chart(responses),
            _responses(responses),
        ],
    )


def to_here(prompt_id: str) -> str:
    return f"/prompt?{urlencode({'id': prompt_id}, errors='replace')}"


def _tiles(responses: list[dict[str, Any]]) -> str:
    if not responses:
        return "<p class='lead'>Nothing has been answered to it: held-out prompts are asked by the evaluator alone.</p>"
    rewards = [it["reward"] for it in responses]
    facts = [
        ("responses", told(len(responses))),
        ("different ones", told(len({it["response"] for it in responses}))),
        ("mean reward", told(sum(rewards) / len(rewards))),
        ("least and greatest", f"{told(min(rewards))} and {told(max(rewards))}"),
        ("drawn", told(sum(it["draws"] or 0 for it in responses))),
        ("never drawn", told(sum(not it["draws"] for it in responses))),
    ]
    return tiles(facts)


def _chart(responses: list[dict[str, Any]]) -> str:
    by_version: dict[int, list[float]] = {}
    for it in responses:
        by_version.setdefault(it["version_start"], []).append(it["reward"])
    points = [(float(version), sum(of) / len(of)) for version, of in sorted(by_version.items())]
    chart = line_chart("Mean reward", [Series("reward", points, marked=True)], x_name="version")
    return f"<div class='grid-of-charts'>{chart}</div>" if len(points) > 1 else ""


def _responses(responses: list[dict[str, Any]]) -> str:
    if not responses:
        return ""
    rewards = [it["reward"] for it in responses]
    names = {"reward": True, "response": False, "tokens": True, "version": True, "drawn": True, "first step": True,
             "last step": True}  # fmt: skip
    rows = [
        [
            chip(it["reward"], min(rewards), max(rewards)),
            f"<a class='said' href='{address(it['trajectory_id'])}'>{line(it['response'] or '', 160) or '(empty)'}</a>",
            f"{it['length']:,}{'' if it['finished'] else ', cut off'}",
            to_version(it["version_start"], it["version_start_attempt"]),
            told(it["draws"] or 0),
            to_step(it["first_step"]),
            to_step(it["last_step"]),
        ]
        for it in responses[:_MOST]
    ]
    more = f"The newest {_MOST:,} of {len(responses):,}." if len(responses) > _MOST else "The newest first."
    return f"{heading('Responses')}<p class='note'>{more}</p>{table(names, rows)}"
