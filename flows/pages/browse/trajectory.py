"""One trajectory: its tokens, what it earned beside the rest of its group, and the steps that learned from it."""

from collections import Counter
from html import escape
from typing import Any

from flows.escaping import line, shown
from flows.pages.browse.components import (
    address,
    chip,
    frame,
    scale,
    shade,
    signed,
    table,
    tiles,
    to_prompt,
    to_sql,
    to_step,
    to_trajectory,
    to_version,
    told,
)  # fmt: skip
from flows.pages.browse.session import Look, Refused
from flows.pages.browse.tokens import Tokens
from flows.pages.html import heading
from storage import layout

_LEAST_SCALE = 0.25  # nats: where all log-ratios are smaller, no colour is full
_MOST_TOKENS = 8000

ONE = """
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


def page(look: Look, tokens: Tokens, searcher: int, seq: int, row: int) -> str:
    place = {"searcher": searcher, "seq": seq, "row": row}
    found = look.rows(ONE.format(**place))
    if not found:
        raise Refused(f"there is no trajectory {searcher}/{seq}/{row}")
    it = found[0]
    since = it["sync"] if it["sync"] is not None else 0
    draws = look.rows(DRAWS.format(**place, since=since))
    group = look.rows(GROUP.format(**place), [it["group_id"]])
    learned = {
        row["trajectory_id"]: row
        for row in look.rows(RESIDUALS.format(since=since), [[other["trajectory_id"] for other in group]])
    }
    asked = look.rows("select answer from prompts where split = 'train' and prompt_id = ?", [it["prompt_id"]])
    answer = f"<p class='note'>The task compares with {_quoted(asked[0]['answer'])}.</p>" if asked else ""
    name = it["trajectory_id"]
    query = f"from trajectory('{name}')"
    by = "imported" if _is_imported(it) else f"by searcher {it['searcher']} in its round {it['round']}"
    return frame(
        look,
        f"/trajectory/{name}",
        f"trajectory {name}",
        [
            f"<div class='title'><h1>Trajectory {line(name)}</h1><span class='around'>"
            f"{to_sql(query)}</span></div>"
            f"<p class='lead'>a response to {to_prompt(it['prompt_id'])}, {by}</p>",
            _words(it, draws),
            _tiles(it, draws),
            f"{heading('Prompt')}<pre class='text'>{shown(it['prompt'] or '')}</pre>{answer}",
            _response(it, tokens),
            _steps(draws),
            _group(group, learned, name),
        ],
    )


def _is_imported(it: dict[str, Any]) -> bool:
    return it["searcher"] >= layout.IMPORTS


def _quoted(text: str | None) -> str:
    return f"<q>{line(text or '', 80)}</q>"


def _words(it: dict[str, Any], draws: list[dict[str, Any]]) -> str:
    said = f"Version {to_version(it['version_start'], it['version_start_attempt'])} began it"
    if it["version_start"] != it["version_end"]:
        said += f" and version {to_version(it['version_end'], it['version_end_attempt'])} ended it"
    said += f", at temperature {told(it['temperature'])}"
    if _is_imported(it):
        version = to_version(it["version_start"], it["version_start_attempt"])
        said = (
            f"It comes from elsewhere, and counts as by version {version}; the log-probabilities of who wrote it are "
            "those that came with it, or else the reference's"
        )
    parts = [f"{said}; it earned {told(it['reward'])}."]
    if it["sync"] is None:
        parts.append("It waits for a sync, and no step could draw it so far.")
    else:
        parts.append(
            f"It entered the replay buffer at sync {it['sync']:,}, after step {it['step']:,}"
            + (f", {it['age']:,} steps old." if it["age"] is not None else ".")
        )
    counted = [draw for draw in draws if not draw["abandoned"]]
    steps = sorted({draw["step"] for draw in counted})
    if steps:
        much = sum(draw["advantage"] or 0.0 for draw in counted)
        which = "made it likelier" if much > 0 else "made it less likely" if much < 0 else "left it as it was"
        span = f"Step {to_step(steps[0])} drew it" if len(steps) == 1 else (
            f"{len(steps):,} steps drew it, from {to_step(steps[0])} to {to_step(steps[-1])}"
        )  # fmt: skip
        often = f", {len(counted):,} times in all" if len(counted) > len(steps) else ""
        known = any(draw["advantage"] is not None for draw in counted)
        parts.append(f"{span}{often}" + (f"; by its advantages that {which} on the whole." if known else "."))
    elif it["sync"] is not None:
        parts.append("No step has drawn it.")
    return f"<section class='words'><p>{' '.join(parts)}</p></section>"


def _tiles(it: dict[str, Any], draws: list[dict[str, Any]]) -> str:
    facts = [("reward", told(it["reward"]))]
    facts += [(name, told(value)) for name, value in list((it["reward_parts"] or {}).items())[:8]]
    facts += [("tokens", f"{it['length']:,}{'' if it['finished'] else ', cut off'}")]
    if ratios := _ratios(it):
        facts.append(("log-ratio, of all tokens", signed(sum(ratios))))
    facts += [("drawn", told(sum(not draw["abandoned"] for draw in draws)))]
    facts += [("top-p", told(it["top_p"])), ("seconds to generate", told(it["generate_seconds"]))]
    return tiles(facts)


def _ratios(it: dict[str, Any]) -> list[float]:
    behaviour, reference = it["behaviour_logps"] or [], it["ref_logps"] or []
    return [mine - its for mine, its in zip(behaviour, reference, strict=False)]


# --- its tokens -------------------------------------------------------------------------------------------------------


def _response(it: dict[str, Any], tokens: Tokens) -> str:
    title = heading("Response, token by token")
    if it["response_tokens"] is None:
        return (
            f"{title}<pre class='text'>{shown(it['response'] or '')}</pre>"
            "<p class='note'>Its tokens and log-probabilities were given up (tba compact --drop-payloads).</p>"
        )
    numbers = it["response_tokens"][:_MOST_TOKENS]
    texts = tokens.texts(numbers)
    ratios = _ratios(it)[:_MOST_TOKENS]
    masks = it["loss_mask"] or [True] * len(numbers)
    written = [abs(ratio) for ratio, mask in zip(ratios, masks, strict=False) if mask]
    most = max([_LEAST_SCALE, *written])
    inside = "".join(
        _token(at, number, texts[at] if texts else None, it, ratios, masks, most) for at, number in enumerate(numbers)
    )
    without = "" if texts else " The run's tokenizer is not at hand, so tokens are numbers."
    masked = (
        "" if all(masks) else "<span><span class='t masked'>underlined</span> the environment's, not learned</span>"
    )
    left_out = len(it["response_tokens"]) - len(numbers)
    more = f" The first {len(numbers):,} of {len(it['response_tokens']):,}." if left_out > 0 else ""
    return (
        f"{title}<div class='legend'><span>log π − log π_ref, in nats: −{told(float(most))}</span>{scale()}"
        f"<span>+{told(float(most))}</span>{masked}</div><pre class='tokens'>{inside}</pre>"
        "<p class='note'>Green is what the policy that generated it gave more chance than the reference does, orange "
        f"what it gave less. Point at a token, or go to it with Tab, for its numbers.{without}{more}</p>"
        f"{'' if not texts else _as_text(it)}"
    )


def _token(
    at: int, number: int, text: str | None, it: dict[str, Any], ratios: list[float], masks: list[bool], most: float
) -> str:
    ratio = ratios[at] if at < len(ratios) else None
    mask = masks[at] if at < len(masks) else True
    says = f"token {at + 1} of {it['length']:,}, number {number}"
    if not mask:
        says += ": of the environment, not learned from"
    elif ratio is not None:
        mine, its = it["behaviour_logps"][at], it["ref_logps"][at]
        says += f": log-ratio {told(ratio)} = {told(mine)} − ({told(its)}), policy minus reference"
    if text is None:
        inside = f"{number} "
    elif text == "":
        inside = "<span class='ends'>·</span>"
    else:
        inside = shown(text.replace("\n", "↵\n"), 200)
    css = " ".join(filter(None, ["t", "masked" if not mask else shade(ratio, most)]))
    return f"<span class='{css}' tabindex='0' data-says='{escape(says)}'>{inside}</span>"


def _as_text(it: dict[str, Any]) -> str:
    text = shown(it["response"] or "")
    return f"<details><summary class='faint'>As text</summary><pre class='text'>{text}</pre></details>"


# --- what became of it ------------------------------------------------------------------------------------------------


def _steps(draws: list[dict[str, Any]]) -> str:
    if not draws:
        return ""
    names = {"step": True, "draws": True, "branch": False, "age": True, "weight": True, "advantage": True,
             "residual": True, "log Z": True, "logp": True, "ref_logp": True}  # fmt: skip
    times = Counter((it["step"], it["attempt"]) for it in draws)
    rows = [
        [
            f"{to_step(it['step'], it['attempt'])} (abandoned)" if it["abandoned"] else to_step(it["step"]),
            told(times[it["step"], it["attempt"]]), line(it["branch"]), told(it["age"]), told(it["weight"]),
            signed(it["advantage"]), told(it["residual"]), told(it["log_z"]), told(it["logp"]), told(it["ref_logp"]),
        ]
        for it in {(it["step"], it["attempt"]): it for it in draws}.values()
    ]  # fmt: skip
    return (
        f"{heading('Steps that drew it')}{table(names, rows)}"
        "<p class='note'>An advantage above 0 raised its log-probability, one below lowered it. logp is what the "
        "trainer's policy gave it at that step.</p>"
    )


def _group(group: list[dict[str, Any]], learned: dict[str, dict[str, Any]], name: str) -> str:
    if len(group) < 2:
        return ""
    rewards = [it["reward"] for it in group]
    names = {"reward": True, "trajectory": False, "response": False, "tokens": True, "drawn": True, "advantage": True,
             "residual": True}  # fmt: skip
    rows = []
    for it in group:
        of = learned.get(it["trajectory_id"], {})
        own = it["trajectory_id"] == name
        rows.append(
            [
                chip(it["reward"], min(rewards), max(rewards)),
                "this one" if own else to_trajectory(it["trajectory_id"]),
                f"<a class='said' href='{address(it['trajectory_id'])}'>{line(it['response'] or '', 120)}</a>",
                f"{it['length']:,}{'' if it['finished'] else ', cut off'}",
                told(of.get("draws", 0)), signed(of.get("advantage")), told(of.get("residual")),
            ]
        )  # fmt: skip
    return (
        f"{heading('Its group')}<p class='note'>All that this prompt got in that round. Advantage and residual are "
        f"those of the last step that drew it.</p>{table(names, rows)}"
    )
