"""One step: what it learned from, and in words what that pushed where, and why."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from flows.escaping import line
from flows.pages.browse.components import (
    address,
    chip,
    frame,
    push,
    signed,
    table,
    tiles,
    to_prompt,
    to_sql,
    to_version,
    told,
)
from flows.pages.browse.overview import events_table
from flows.pages.browse.session import Look, Refused
from flows.pages.html import heading
from storage.runs.events import ROUTINE

_BEFORE = 20  # steps that a step is compared with
_UNUSUAL = 2.0  # times the median of those
_MOST_TOLD = 3
_OPEN = 3  # slots that are open at first
_MOST_SLOTS = 256
_LEAST_PUSH = 1e-3  # less is the rounding of an advantage of 0

STEP = "select * from steps_all where step = {step} order by abandoned, attempt desc"
BATCH = """
with drawn as (select * from draws_all where sync = {sync} and step = {step} and attempt = {attempt})
select drawn.* exclude (prompt_id), t.prompt_id, left(t.prompt, 2000) as prompt,
    left(t.response, 2000) as response, t.reward, t.length, t.finished,
    t.version_start, t.version_start_attempt
from drawn join (
    select trajectory_id, prompt_id, prompt, response, reward, length, finished, version_start, version_start_attempt
    from trajectories where {pruned}
) t using (trajectory_id)
order by slot, position
"""
SHARDS = """
select split_part(trajectory_id, '/', 1)::int as searcher, split_part(trajectory_id, '/', 2)::int as seq, count(*)
from draws_all where sync = {sync} and step = {step} and attempt = {attempt} group by 1, 2
"""
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


@dataclass(frozen=True)
class Drawn:
    """A response of a slot, with all of its draws there."""

    row: dict[str, Any]
    times: int

    @property
    def push(self) -> float:
        return (self.row["advantage"] or 0.0) * self.times

    @property
    def has(self) -> float | None:
        """Its log-ratio, by the policy at that step."""
        logp, reference = self.row["logp"], self.row["ref_logp"]
        return None if logp is None or reference is None else logp - reference

    def wants(self, beta: float | None) -> float | None:
        """The log-ratio at which an objective that balances would leave it be. None where it is not what reward and
        log Z come to: the target is tempered, or is no policy's log-ratio to the reference."""
        row, has = self.row, self.has
        if has is None or row["residual"] is None or row["log_z"] is None or not beta:
            return None
        wanted, expected = has - row["residual"], row["reward"] / beta - row["log_z"]
        return wanted if abs(wanted - expected) <= 0.05 * (1 + abs(expected)) else None


def page(look: Look, number: int, attempt: int | None) -> str:
    steps = look.rows(STEP.format(step=number))
    chosen = [it for it in steps if attempt is None or it["attempt"] == attempt]
    if not chosen:
        of = "" if attempt is None else f" of attempt {attempt}"
        raise Refused(f"there is no step {number}{of}: it has not been taken, or its ledger is not stored yet")
    it = chosen[0]
    place = {"step": number, "sync": it["sync"], "attempt": it["attempt"]}
    slots, lost = _batch(look, place)
    events = look.rows(EVENTS.format(**place))
    alarms = look.rows(LASTING, [it["created_at"], it["created_at"]])
    return frame(
        look,
        f"/step/{number}" + ("" if attempt is None else f"?attempt={attempt}"),
        f"step {number}",
        [
            _head(look, it, steps),
            _words(it, slots, lost, look.ask(BEFORE.format(**place, before=_BEFORE)).rows),
            _tiles(it),
            _pushed(it, slots),
            _slots(it, slots),
            heading("Meanwhile") + events_table(events) if events else "",
            heading("Alarms that lasted") + events_table(alarms) if alarms else "",
        ],
    )


def _batch(look: Look, place: dict[str, int]) -> tuple[list[list[Drawn]], int]:
    """What was drawn, slot by slot, and how many draws are of shards that are gone. Only its own shards are opened."""
    shards = look.ask(SHARDS.format(**place)).rows
    searchers, seqs = (",".join(map(str, sorted({shard[n] for shard in shards}))) or "-1" for n in (0, 1))
    pruned = f"searcher in ({searchers}) and seq in ({seqs}) and trajectory_id in (select trajectory_id from drawn)"
    grouped: defaultdict[int, dict[str, list[dict[str, Any]]]] = defaultdict(dict)
    rows = look.rows(BATCH.format(**place, pruned=pruned))
    for row in rows:
        grouped[row["slot"]].setdefault(row["trajectory_id"], []).append(row)
    slots = [[Drawn(found[0], len(found)) for found in grouped[slot].values()] for slot in sorted(grouped)]
    return slots, sum(draws for _, _, draws in shards) - len(rows)


def _head(look: Look, it: dict[str, Any], steps: list[dict[str, Any]]) -> str:
    number = it["step"]
    before, after = look.ask(AROUND.format(step=number)).rows[0]
    around = f"<a href='/step/{before}' rel='prev'>← step {before:,}</a>" if before else ""
    around += f"<a href='/step/{after}' rel='next'>step {after:,} →</a>" if after else ""
    others = [other for other in steps if other["attempt"] != it["attempt"]]
    also = "".join(
        f" · also taken by <a href='/step/{number}?attempt={other['attempt']}'>attempt {other['attempt']}</a>"
        f"{', abandoned' if other['abandoned'] else ''}"
        for other in others
    )
    gone = ", abandoned: the weights of now do not descend from it" if it["abandoned"] else ""
    from_version = f"from version {to_version(it['version'], it['version_attempt'])}"
    query = f"from learned_from({number})"
    return (
        f"<div class='title'><h1>Step {number:,}</h1><span class='around'>{around}{to_sql(query)}</span></div>"
        f"<p class='lead'>{from_version}, closed by sync {it['sync']:,} · attempt {it['attempt']}{gone}{also} · stored "
        f"{told(it['created_at'])}</p>"
    )


# --- in words ---------------------------------------------------------------------------------------------------------


def _words(it: dict[str, Any], slots: Sequence[Sequence[Drawn]], lost: int, before: Sequence[tuple[Any, ...]]) -> str:
    said = [_what(it, slots), _lost(lost), *_outcome(it, before)]
    if not it.get("skipped"):
        said += [_extremes(it, slots), _agreement(slots)]
    return f"<section class='words'>{''.join(f'<p>{text}</p>' for text in said if text)}</section>"


def _what(it: dict[str, Any], slots: Sequence[Sequence[Drawn]]) -> str:
    drawn = [one for slot in slots for one in slot]
    times = sum(one.times for one in drawn)
    if not times:
        return "What it drew is not stored."
    recent = sum(one.times for one in drawn if one.row["branch"] == "recent") / times
    ages = [one.row["age"] for one in drawn for _ in range(one.times)]
    prompts = len({one.row["prompt_id"] for one in drawn})
    return (
        f"It learned from {times:,} draws of {len(drawn):,} responses to {prompts:,} prompt{'s' * (prompts != 1)}. "
        f"{recent:.0%} of them were recent: they had entered at the newest sync. Their age was "
        f"{told(sum(ages) / times)} steps in the mean, and {max(ages):,} at most."
    )


def _lost(draws: int) -> str:
    one = draws == 1
    return (
        f"{draws:,} draw{' is' if one else 's are'} missing from all that follows: the response{'' if one else 's'} "
        "cannot be found. <code>tba check</code> says which shards are gone."
        if draws
        else ""
    )


def _outcome(it: dict[str, Any], before: Sequence[tuple[Any, ...]]) -> list[str]:
    said = []
    if it.get("skipped"):
        said.append("Loss or gradient was not finite, so nothing was updated: the step was skipped.")
    if it.get("clipped"):
        said.append(f"Its gradient, of norm {told(it['grad_norm'])}, was scaled down to training.clip_norm.")
    for name, values in (("loss", [row[0] for row in before]), ("gradient norm", [row[1] for row in before])):
        own, known = it["loss" if name == "loss" else "grad_norm"], [value for value in values if value is not None]
        usual = median(known) if len(known) >= 5 else 0.0
        if own is not None and usual > 0 and not 1 / _UNUSUAL < own / usual < _UNUSUAL:
            said.append(
                f"Its {name} is unusual: {told(own)}, where the median of the {len(known)} steps before it is "
                f"{told(usual)}."
            )
    return said


def _extremes(it: dict[str, Any], slots: Sequence[Sequence[Drawn]]) -> str:
    drawn = [(one, slot) for slot in slots for one in slot]
    up = max(drawn, key=lambda pair: pair[0].push, default=None)
    down = min(drawn, key=lambda pair: pair[0].push, default=None)
    said = []
    if up and up[0].push > 0:
        said.append(f"Most of all it <b class='up'>raised</b> {_one(*up, it['beta'])}")
    if down and down[0].push < 0:
        said.append(f"Most of all it <b class='down'>lowered</b> {_one(*down, it['beta'])}")
    return "</p><p>".join(said)


def _one(one: Drawn, slot: Sequence[Drawn], beta: float | None) -> str:
    row, has, wants = one.row, one.has, one.wants(beta)
    often = "" if one.times == 1 else f" {one.times} times"
    which = (
        f"<a href='{address(row['trajectory_id'])}'><q>{line(row['response'] or '', 60)}</q></a> to "
        f"<q>{line(row['prompt'] or '', 60)}</q> (reward {told(row['reward'])}, drawn{often} in slot {row['slot']}): "
    )
    if has is not None and wants is not None:
        side = "above" if has > wants else "below"
        return (
            f"{which}its log-ratio to the reference is {told(has)}, {told(abs(has - wants))} nats {side} the "
            f"{told(wants)} that its reward is worth ({told(row['reward'])} / β = {told(row['reward'] / beta)}, less "
            f"{told(row['log_z'])}, the log Z of its slot). Its advantage is {signed(row['advantage'])}."
        )
    mean = sum(other.row["reward"] * other.times for other in slot) / sum(other.times for other in slot)
    against = f"the mean reward of its slot is {told(mean)}, and " if len(slot) > 1 else ""
    return f"{which}{against}its advantage is {signed(row['advantage'])}."


def _agreement(slots: Sequence[Sequence[Drawn]]) -> str:
    """How far the push follows rewards, and where it has to come from elsewhere."""
    alike = [slot for slot in slots if len({one.row["reward"] for one in slot}) == 1]
    differing = [slot for slot in slots if len({one.row["reward"] for one in slot}) > 1]
    balances = any(one.row["residual"] is not None for slot in slots for one in slot)
    better = worse = better_up = worse_down = 0
    for slot in differing:
        mean = sum(one.row["reward"] * one.times for one in slot) / sum(one.times for one in slot)
        for one in slot:
            if one.row["advantage"] is None or one.row["reward"] == mean:
                continue
            if one.row["reward"] > mean:
                better, better_up = better + one.times, better_up + one.times * (one.push > 0)
            else:
                worse, worse_down = worse + one.times, worse_down + one.times * (one.push < 0)
    said = []
    if better or worse:
        said.append(
            f"Of {better:,} draws with a reward above their slot's mean {better_up:,} were raised; of {worse:,} below "
            f"it {worse_down:,} were lowered."
        )
        if balances and (better_up < better or worse_down < worse):
            said.append("Whatever went the other way is already likelier, or less likely, than its reward asks for.")
    if alike:
        many = "its slot" if len(slots) == 1 else f"{len(alike):,} of {len(slots):,} slots"
        # A baseline that is not the slot's, as a critic's or the whole batch's, pushes there too.
        pushed = not balances and any(abs(one.push) > _LEAST_PUSH for slot in alike for one in slot)
        why = "" if pushed else ": there nothing but the reference can push"
        said.append(f"In {many} all rewards are alike{why}.")
    return " ".join(said)


def _tiles(it: dict[str, Any]) -> str:
    names = {
        "loss": "loss", "grad_norm": "gradient norm", "lr": "learning rate", "beta": "beta",
        "reward_mean": "mean reward", "log_z": "mean log Z", "log_ratio_mean": "mean log-ratio",
        "residual_abs": "mean |residual|", "equal_rewards": "groups with equal rewards", "tokens": "tokens",
        "seconds_step": "seconds", "seconds_wait": "of them, waiting",
    }  # fmt: skip
    return tiles((text, told(it[name])) for name, text in names.items() if it.get(name) is not None)


# --- the batch --------------------------------------------------------------------------------------------------------

_COLUMNS = {"reward": True, "response": False, "draws": True, "advantage": True, "": False, "log-ratio": True,
            "wanted": True, "branch": False, "age": True, "weight": True, "version": True}  # fmt: skip


def _pushed(it: dict[str, Any], slots: Sequence[Sequence[Drawn]]) -> str:
    """What was raised most and what was lowered most, in which slot: a prompt may have several."""
    drawn = sorted((one for slot in slots for one in slot), key=lambda one: one.push, reverse=True)
    most = max((abs(one.row["advantage"] or 0.0) for one in drawn), default=0.0)
    rewards = [one.row["reward"] for one in drawn]
    said = ""
    for title, chosen in (
        ("Raised most", [one for one in drawn[:_MOST_TOLD] if one.push > 0]),
        ("Lowered most", [one for one in drawn[::-1][:_MOST_TOLD] if one.push < 0]),
    ):
        rows = [
            [told(one.row["slot"]), *_row(one, it["beta"], most, min(rewards), max(rewards), prompt=True)]
            for one in chosen
        ]
        said += f"{heading(title)}{table({'slot': True, **_COLUMNS}, rows)}" if rows else ""
    return said


def _slots(it: dict[str, Any], slots: Sequence[Sequence[Drawn]]) -> str:
    drawn = [one for slot in slots for one in slot]
    if not drawn:
        return ""
    most = max(abs(one.row["advantage"] or 0.0) for one in drawn)
    rewards = [one.row["reward"] for one in drawn]
    low, high = min(rewards), max(rewards)
    inside = "".join(_slot(it, slot, most, low, high, n < _OPEN) for n, slot in enumerate(slots[:_MOST_SLOTS]))
    left_out = f"<p class='note'>The first {_MOST_SLOTS:,} of {len(slots):,}.</p>" if len(slots) > _MOST_SLOTS else ""
    return (
        f"{heading('The batch, slot by slot')}<p class='note'>A slot is a prompt with the responses drawn to it. A bar "
        "to the right was raised, one to the left lowered, each as far as its advantage says. <i>Log-ratio</i> is log "
        "π − log π_ref of the response before the step; <i>wanted</i> is the one at which the loss would leave it be."
        f"</p>{inside}{left_out}"
    )


def _slot(it: dict[str, Any], slot: Sequence[Drawn], most: float, low: float, high: float, is_open: bool) -> str:
    first = slot[0].row
    rewards = "".join(f"{chip(one.row['reward'], low, high)} " for one in slot[:8]) + ("…" if len(slot) > 8 else "")
    rows = [_row(one, it["beta"], most, low, high) for one in slot]
    log_z = "" if first["log_z"] is None else f" · log Z {told(first['log_z'])}"
    return (
        f"<details class='slot'{' open' if is_open else ''}><summary><span class='faint'>{first['slot']}</span>"
        f"<span class='one said'>{line(first['prompt'] or '', 120)}</span><span>{rewards}</span></summary>"
        f"<p class='note'>{to_prompt(first['prompt_id'])} · {line(first['branch'])}{log_z}</p>"
        f"{table(_COLUMNS, rows)}</details>"
    )


def _row(one: Drawn, beta: float | None, most: float, low: float, high: float, *, prompt: bool = False) -> list[str]:
    row = one.row
    asked = f"<span class='faint said'>{line(row['prompt'] or '', 60)}</span> " if prompt else ""
    response = line(row["response"] or "", 120) or "(empty)"
    return [
        chip(row["reward"], low, high),
        f"{asked}<a class='said' href='{address(row['trajectory_id'])}'>{response}</a>",
        told(one.times),
        signed(row["advantage"]),
        push(row["advantage"], most),
        told(one.has),
        told(one.wants(beta)),
        line(row["branch"]),
        told(row["age"]),
        told(row["weight"]),
        to_version(row["version_start"], row["version_start_attempt"]),
    ]
