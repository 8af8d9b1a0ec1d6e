"""The page of one version: how it scored, what it generated, with examples of its responses, and how other versions
responded to the same prompts."""

from typing import Any

from markupsafe import Markup

from flows.pages import addresses
from flows.pages.browse.frame import show
from flows.pages.browse.run_snapshot import Refused, RunSnapshot
from flows.pages.tables import Fact, facts
from storage import layout

_MOST_PROMPTS = 30
_EXAMPLES = 3  # responses of each kind: with the highest rewards, with the lowest, and of the others at random
_MOST_SCORED = 6  # responses to held-out prompts

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
CHOSEN = f"""
with
  own as (
    select trajectory_id,
        row_number() over (order by reward desc, trajectory_id) as from_best,
        row_number() over (order by reward, trajectory_id) as from_worst
    from trajectories
    where version_start = {{version}} and version_start_attempt = {{attempt}} and searcher < {layout.IMPORTS}
  ),
  sorted as (
    select *, case when from_best <= {{most}} then 'best' when from_worst <= {{most}} then 'worst' else 'random' end
        as kind
    from own
  )
select trajectory_id, kind from sorted
qualify kind <> 'random' or row_number() over (partition by kind order by hash(trajectory_id)) <= {{most}}
order by array_position(['best', 'random', 'worst'], kind), from_best
"""
EXAMPLES = """
select trajectory_id, prompt_id, left(prompt, 2000) as prompt, left(response, 2000) as response, reward, length,
    finished
from trajectories where trajectory_id in (select unnest(?))
"""
SCORED = """
select prompt_id, left(prompt, 2000) as prompt, left(response, 2000) as response, answer, reward
from examples where version = {version} and attempt = {attempt} order by prompt_id limit {most}
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
    examples = _examples(snapshot, place)
    rewards = [it["reward"] for it in examples]
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
        examples=examples,
        lowest=min(rewards, default=0.0),
        highest=max(rewards, default=0.0),
        scored=snapshot.rows(SCORED.format(**place, most=_MOST_SCORED)),
        prompts=prompts,
        compared=any(it["before"] is not None or it["after"] is not None for it in prompts),
        most=_MOST_PROMPTS,
        query=f"select * from trajectories where version_start = {number}",
    )


def _examples(snapshot: RunSnapshot, place: dict[str, int]) -> list[dict[str, Any]]:
    """Return the best and the worst trajectories that began with a version, and some of the others, chosen by a hash of
    their names. Each has its `kind`. The texts of all other trajectories are not read."""
    chosen = dict(snapshot.ask(CHOSEN.format(**place, most=_EXAMPLES)).rows)
    found = {it["trajectory_id"]: it for it in snapshot.rows(EXAMPLES, [list(chosen)])} if chosen else {}
    return [{**found[name], "kind": kind} for name, kind in chosen.items()]


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
