"""One version: how it scored, what it generated, and what others gave to the same prompts."""

from typing import Any

from flows.escaping import line
from flows.pages.browse.components import frame, signed, table, tiles, to_prompt, to_sql, to_step, to_version, told
from flows.pages.browse.session import Look, Refused
from flows.pages.html import heading
from storage import layout

_MOST_PROMPTS = 30

VERSION = "select * from versions where version = {version} order by abandoned, attempt desc"
SCORES = """
select metric, value, n from evaluations where version = {version} and attempt = {attempt}
order by length(metric), metric
"""
STEPS = """
select min(step), max(step), count(*) from steps_all where version = {version} and version_attempt = {attempt}
"""
GENERATED = f"""
select count(*), avg(reward), avg(length), avg(finished::int), count(distinct prompt_id), count(distinct searcher)
from trajectories
where version_start = {{version}} and version_start_attempt = {{attempt}} and searcher < {layout.IMPORTS}
"""
PROMPTS = f"""
with
  own as (
    select prompt_id from trajectories
    where version_start = {{version}} and version_start_attempt = {{attempt}} and searcher < {layout.IMPORTS}
    group by 1 order by hash(prompt_id) limit {{most}}
  )
select prompt_id, any_value(prompt) as prompt,
    avg(reward) filter (version_start < {{version}}) as before,
    avg(reward) filter (version_start = {{version}}) as here,
    avg(reward) filter (version_start > {{version}}) as after
from trajectories where prompt_id in (from own) and searcher < {layout.IMPORTS}
group by 1 order by here desc nulls last, prompt_id
"""
AROUND = """
select (select max(version) from versions where version < {version}),
    (select min(version) from versions where version > {version})
"""


def page(look: Look, number: int, attempt: int | None) -> str:
    found = [it for it in look.rows(VERSION.format(version=number)) if attempt is None or it["attempt"] == attempt]
    if not found:
        raise Refused(f"there is no version {number}" + ("" if attempt is None else f" of attempt {attempt}"))
    it = found[0]
    place = {"version": number, "attempt": it["attempt"]}
    generated = look.ask(GENERATED.format(**place)).rows[0]
    return frame(
        look,
        f"/version/{number}" + ("" if attempt is None else f"/{attempt}"),
        f"version {number}",
        [
            _head(look, it),
            _words(look, it, place, generated[0]),
            _tiles(it, generated),
            _scores(look.rows(SCORES.format(**place))),
            _prompts(look.rows(PROMPTS.format(**place, most=_MOST_PROMPTS)), number),
        ],
    )


def _head(look: Look, it: dict[str, Any]) -> str:
    number = it["version"]
    before, after = look.ask(AROUND.format(version=number)).rows[0]
    around = f"<a href='/version/{before}' rel='prev'>← version {before:,}</a>" if before is not None else ""
    around += f"<a href='/version/{after}' rel='next'>version {after:,} →</a>" if after is not None else ""
    gone = ", abandoned: the weights of now do not descend from it" if it["abandoned"] else ""
    return (
        f"<div class='title'><h1>Version {number:,}</h1><span class='around'>{around}</span></div><p class='lead'>the "
        f"policy after step {to_step(it['step'])} · attempt {it['attempt']}{gone} · {line(it['state'])} · published "
        f"{told(it['created_at'])}</p>"
    )


def _words(look: Look, it: dict[str, Any], place: dict[str, Any], responses: int) -> str:
    first, last, steps = look.ask(STEPS.format(**place)).rows[0]
    said = "It is the policy before training." if it["step"] == 0 else f"It is the policy after {it['step']:,} steps."
    if steps:
        said += f" Steps {to_step(first)} to {to_step(last)} went on from it."
    if responses:
        form = f"/trajectories?version_from={it['version']}&amp;version_to={it['version']}"
        said += f" Searchers began <a href='{form}'>{responses:,} trajectories</a> with it."
    else:
        said += " No trajectory was begun with it."
    return f"<section class='words'><p>{said}</p></section>"


def _tiles(it: dict[str, Any], generated: tuple[Any, ...]) -> str:
    count, reward, length, finished, prompts, _ = generated
    facts = [("trajectories", told(count))]
    if count:
        facts += [("their mean reward", told(reward)), ("their mean length", told(length))]
        facts += [("finished", f"{finished:.1%}"), ("prompts asked", told(prompts))]
    if it["bytes"] is not None:
        facts.append(("megabytes", told(it["bytes"] / 1e6)))
    if it["changed_share"] is not None:
        facts.append(("weights changed", f"{it['changed_share']:.1%}"))
    return tiles(facts)


def _scores(scores: list[dict[str, Any]]) -> str:
    if not scores:
        return ""
    rows = [[line(it["metric"]), told(it["value"]), told(it["n"])] for it in scores]
    return f"{heading('Scores')}{table({'metric': False, 'value': True, 'of': True}, rows)}"


def _prompts(prompts: list[dict[str, Any]], number: int) -> str:
    if not prompts:
        return ""
    if all(it["before"] is None and it["after"] is None for it in prompts):
        return f"{heading('The same prompts in other versions')}<p class='note'>No other version was asked them.</p>"
    names = {"prompt": False, "text": False, "versions before": True, "this one": True, "versions after": True,
             "gain": True}  # fmt: skip
    rows = [
        [
            to_prompt(it["prompt_id"]), f"<span class='said'>{line(it['prompt'] or '', 100)}</span>",
            told(it["before"]), told(it["here"]), told(it["after"]),
            "" if it["before"] is None or it["here"] is None else signed(it["here"] - it["before"]),
        ]
        for it in prompts
    ]  # fmt: skip
    query = f"select * from trajectories where version_start = {number}"
    return (
        f"{heading('The same prompts in other versions')}<p class='note'>Mean rewards of responses to prompts that "
        f"version {to_version(number)} was asked, at most {_MOST_PROMPTS}; {to_sql(query, 'all of its responses')}.</p>"
        f"{table(names, rows)}"
    )
