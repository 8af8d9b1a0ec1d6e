"""The page of one version: how it scored, what it generated, and how other versions responded to the same prompts."""

from typing import Any

from markupsafe import Markup

from flows.pages import addresses
from flows.pages.browse.frame import show
from flows.pages.browse.run_snapshot import Refused, RunSnapshot
from flows.pages.tables import Fact, facts
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


def page(snapshot: RunSnapshot, number: int, attempt: int | None) -> Markup:
    found = [it for it in snapshot.rows(VERSION.format(version=number)) if attempt is None or it["attempt"] == attempt]
    if not found:
        raise Refused(f"there is no version {number}" + ("" if attempt is None else f" of attempt {attempt}"))
    version = found[0]
    place = {"version": number, "attempt": version["attempt"]}
    before, after = snapshot.ask(AROUND.format(version=number)).rows[0]
    generated = snapshot.ask(GENERATED.format(**place)).rows[0]
    first_step, last_step, steps = snapshot.ask(STEPS.format(**place)).rows[0]
    prompts = snapshot.rows(PROMPTS.format(**place, most=_MOST_PROMPTS))
    return show(
        snapshot,
        addresses.version(number, attempt),
        "version.html",
        version=version,
        before=before,
        after=after,
        steps=steps,
        first_step=first_step,
        last_step=last_step,
        responses=generated[0],
        facts=_facts(version, generated),
        scores=snapshot.ask(SCORES.format(**place)),
        prompts=prompts,
        compared=any(it["before"] is not None or it["after"] is not None for it in prompts),
        most=_MOST_PROMPTS,
        query=f"select * from trajectories where version_start = {number}",
    )


def _facts(version: dict[str, Any], generated: tuple[Any, ...]) -> list[Fact]:
    count, reward, length, finished, prompts, _ = generated
    told = [("trajectories", count)]
    if count:
        told += [("mean reward", reward), ("mean length", length)]
        told += [("finished", f"{finished:.1%}"), ("prompts", prompts)]
    if version["bytes"] is not None:
        told.append(("megabytes", version["bytes"] / 1e6))
    if version["changed_share"] is not None:
        told.append(("weights changed", f"{version['changed_share']:.1%}"))
    return facts(told)
