"""Held-out prompts with the greedy responses before and after training: those of the first and of the last scored
version, side by side in a report and one below the other in a terminal."""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup
from rich.cells import cell_len

from flows.escaping import plain
from flows.pages.rendering import render
from flows.pages.values import written
from storage import layout
from storage.objects.damage import DamageLog
from storage.runs.attempts import chain_as_readable, stands
from storage.runs.run import Run
from storage.weights.evaluations import Evaluations
from tba.types import Example

_WIDTH = 100  # columns of a terminal
_MOST_IN_TERMINAL, _MOST_IN_REPORT = 10, 50
_ANSWER_WIDTH = 30
_OPENING = re.compile(r"<\|[^<>|]*start[^<>|]*\|>\s*\w+|<\|[^<>|]*\|>")
"""Marks of a chat template, such as `<|im_start|>user`."""


class Pair(NamedTuple):
    before: Example
    after: Example | None  # None while only one version has been scored, or if that version has no such example


def pairs(run: Run) -> list[Pair]:
    """Return the examples of the first scored version, each with the example of the last scored version for the same
    prompt. Versions from which the current weights do not descend, and records that are damaged, are left out."""
    damage = DamageLog()
    run = run.for_reading(damage.looking_at)
    ledger = [name for entry in run.store.list(layout.STEPS) if (name := layout.parse_ledger(entry.key))]
    spans = chain_as_readable(run, ledger, damage)
    examples = [it for it in Evaluations(run).examples(damage.looking_at) if stands(spans, it.version)]
    if not examples:
        return []
    first, last = examples[0].version, examples[-1].version
    after = {it.prompt_id: it for it in examples if it.version == last} if last != first else {}
    return [Pair(it, after.get(it.prompt_id)) for it in examples if it.version == first]


def section(run: Run) -> Markup:
    """Return the section of the report; empty text if there are no examples."""
    found = pairs(run)
    if not found:
        return Markup()
    rewards = [it.reward for pair in found for it in pair if it and math.isfinite(it.reward)]
    return render(
        "report/before_after.html",
        pairs=found[:_MOST_IN_REPORT],
        count=len(found),
        before=found[0].before,
        after=_after(found),
        lowest=min(rewards, default=0.0),
        highest=max(rewards, default=0.0),
    )


def as_text(run: Run) -> str:
    """Return the first pairs as text for a terminal; empty text if there are no examples."""
    found = pairs(run)[:_MOST_IN_TERMINAL]
    if not found:
        return ""
    before, after = found[0].before, _after(found)
    title = f"greedy responses to held-out prompts: before is {_version(before)}"
    lines = [f"{title}, after is {_version(after)}" if after else title]
    for number, pair in enumerate(found, 1):
        answer = f"   answer: {_cut(_line(pair.before.answer), _ANSWER_WIDTH, 20)}" if pair.before.answer else ""
        start = f"{number:>3}. "
        room = _WIDTH - cell_len(start + answer)
        lines.append(f"{start}{_cut(_line(_OPENING.sub('', pair.before.prompt)), room, 0)}{answer}")
        lines += [_response(name, it) for name, it in (("before", pair.before), ("after", pair.after)) if it]
    return "\n".join(lines)


def _after(found: Sequence[Pair]) -> Example | None:
    return next((pair.after for pair in found if pair.after), None)


def _version(it: Example) -> str:
    return f"version {it.version.number} (step {it.step:,})"


def _response(name: str, it: Example) -> str:
    start = f"       {name:<6} {written(it.reward):>6}  "
    return start + _cut(_line(it.response), _WIDTH - cell_len(start), _WIDTH // 2)


def _line(text: str) -> str:
    """Return a text in one line, in which ⏎ stands for line breaks, without control characters."""
    lines = (" ".join(line.split()) for line in text.splitlines())
    return plain(" ⏎ ".join(line for line in lines if line))


def _cut(line: str, width: int, head: int) -> str:
    """Return at most `width` columns of a line: of a longer line, the first `head` columns and the end, with … between
    them."""
    if cell_len(line) <= width:
        return line
    return f"{_first(line, head)}…{_first(line[::-1], width - head - 1)[::-1]}"


def _first(line: str, width: int) -> str:
    taken = 0
    for place, character in enumerate(line):
        taken += cell_len(character)
        if taken > width:
            return line[:place]
    return line
