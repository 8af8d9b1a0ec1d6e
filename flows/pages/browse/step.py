"""The page of one gradient step: its batch, and an explanation in words of which responses the step raised and lowered,
and why."""

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from flows.pages import addresses
from flows.pages.browse import step_summary
from flows.pages.browse.batch import Batch, beta_of_targets, read_batch
from flows.pages.browse.frame import show
from flows.pages.browse.run_snapshot import Refused, RunSnapshot
from flows.pages.tables import Fact, facts
from storage.runs.events import ROUTINE

_BEFORE = 20  # steps that a step is compared with
_MOST_EXTREMES = 3  # responses in each of the tables Raised most and Lowered most
_OPEN = 3  # slots that are open at first
_MOST_SLOTS = 256
_MOST_CHIPS = 8  # rewards in the line of a slot
_FACTS = {
    "loss": "loss", "grad_norm": "gradient norm", "lr": "learning rate", "beta": "beta", "reward_mean": "mean reward",
    "log_z": "mean log Z", "log_ratio_mean": "mean log-ratio", "residual_abs": "mean |residual|",
    "equal_rewards": "groups with equal rewards", "tokens": "tokens", "seconds_step": "seconds",
    "seconds_wait": "seconds of waiting",
}  # fmt: skip

STEP = "select * from steps_all where step = {step} order by abandoned, attempt desc"
COMPUTED = "select compute_dtype, device, threads from attempts where attempt = {attempt}"
BEFORE = """
select loss, grad_norm from steps where step < {step} and step >= {step} - {before} and attempt <= {attempt}
"""
AROUND = "select (select max(step) from steps where step < {step}), (select min(step) from steps where step > {step})"
EVENTS = f"""
with ledgers as (select distinct sync, created_at from steps_all where attempt = {{attempt}})
select created_at, role, severity, kind, message from events
where kind not in {*ROUTINE, ""}
    and created_at <= (select max(created_at) from ledgers where sync = {{sync}})
    and created_at >= coalesce(
        (select max(created_at) from ledgers where sync < {{sync}}),
        (select max(created_at) from attempts where attempt = {{attempt}})
    )
order by created_at limit 40
"""
LASTING = """
select began_at as created_at, role, severity, kind, message from alarms
where began_at <= ? and (ended_at is null or ended_at >= ?) order by began_at limit 20
"""


def page(snapshot: RunSnapshot, number: int, attempt: int | None) -> Markup:
    steps = snapshot.rows(STEP.format(step=number))
    chosen = [it for it in steps if attempt is None or it["attempt"] == attempt]
    if not chosen:
        of = "" if attempt is None else f" of attempt {attempt}"
        raise Refused(f"there is no step {number}{of}: it has not been taken, or its ledger is not stored yet")
    step = chosen[0]
    place = {"step": number, "sync": step["sync"], "attempt": step["attempt"]}
    previous_step, next_step = snapshot.ask(AROUND.format(step=number)).rows[0]
    batch, beta = read_batch(snapshot, place), beta_of_targets(snapshot.run.config, step["beta"])
    return show(
        snapshot,
        addresses.step(number, attempt),
        "step.html",
        step=step,
        previous_step=previous_step,
        next_step=next_step,
        others=[it for it in steps if it["attempt"] != step["attempt"]],
        query=f"from learned_from({number})",
        summary=_summary(step, batch, beta, snapshot.ask(BEFORE.format(**place, before=_BEFORE)).rows),
        facts=[*_facts(step), *_computed(snapshot.rows(COMPUTED.format(**place)))],
        batch=_shown(batch, beta),
        events=snapshot.rows(EVENTS.format(**place)),
        alarms=snapshot.rows(LASTING, [step["created_at"], step["created_at"]]),
    )


def _summary(
    step: dict[str, Any], batch: Batch, beta: float | None, before: Sequence[tuple[Any, ...]]
) -> dict[str, Any]:
    skipped = bool(step.get("skipped"))
    return {
        "learned_from": step_summary.learned_from(batch),
        "missing": batch.missing,
        "outcome": list(step_summary.outcome(step, before)),
        "extremes": [] if skipped else step_summary.extremes(batch, beta),
        "agreement": "" if skipped else step_summary.agreement(batch.slots),
    }


def _facts(step: dict[str, Any]) -> list[Fact]:
    return facts((title, step[name]) for name, title in _FACTS.items() if step.get(name) is not None)


def _computed(attempts: Sequence[dict[str, Any]]) -> list[Fact]:
    """Return how the attempt that took the step computed; nothing if this is not stored."""
    names = {"compute_dtype": "number format", "device": "device", "threads": "threads"}
    return facts((title, it[name]) for it in attempts for name, title in names.items() if it[name] is not None)


def _shown(batch: Batch, beta: float | None) -> dict[str, Any]:
    """Return the template values of a batch: its slots and tables, the lowest and the highest reward (for the scale of
    the colours), and the largest absolute advantage (for the scale of the bars)."""
    rewards = [it.row["reward"] for it in batch]
    tables = {"Raised most": batch.most_raised(_MOST_EXTREMES), "Lowered most": batch.most_lowered(_MOST_EXTREMES)}
    return {
        "beta": beta,
        "lowest": min(rewards, default=0.0),
        "highest": max(rewards, default=0.0),
        "largest": max((abs(it.row["advantage"] or 0.0) for it in batch), default=0.0),
        "tables": {title: found for title, found in tables.items() if found},
        "slots": batch.slots[:_MOST_SLOTS],
        "count": len(batch.slots),
        "open": _OPEN,
        "chips": _MOST_CHIPS,
    }
