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
_BREAK = " ⏎ "
_HEADER = ("prompt", "answer", "before", "reward", "after", "reward")
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
    rows = [_cells(pair) for pair in found]
    return "\n".join(
        [f"{title}, after is {_version(after)}" if after else title, *(_in_columns(rows) or _in_lines(rows))]
    )


def _after(found: Sequence[Pair]) -> Example | None:
    return next((pair.after for pair in found if pair.after), None)


def _version(it: Example) -> str:
    return f"version {it.version.number} (step {it.step:,})"


def _cells(pair: Pair) -> list[str]:
    """Return what `_HEADER` names, each as one line. Missing values are empty texts."""
    responses = [(_line(it.response) or "(empty)", written(it.reward)) if it else ("", "") for it in pair]
    return [_line(_OPENING.sub("", pair.before.prompt)), _line(pair.before.answer), *responses[0], *responses[1]]


def _in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table with a line for each row; nothing if the table is wider than a terminal."""
    named = zip(_HEADER, zip(*rows, strict=True), strict=True)
    columns = [(name, *cells) for name, cells in named if any(cells)]
    widths = [max(map(cell_len, column)) for column in columns]
    if sum(widths) + 2 * len(widths) > _WIDTH:
        return []
    lines = [zip(line, widths, strict=True) for line in zip(*columns, strict=True)]
    return ["".join(f"  {cell}{' ' * (width - cell_len(cell))}" for cell, width in line).rstrip() for line in lines]


def _in_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each prompt, and one below it for each response. Of a long prompt, the end is shown, or the
    beginning and the end of its last line if that is long itself: prompts often end with their question."""
    lines: list[str] = []
    for number, (prompt, answer, before, reward_before, after, reward_after) in enumerate(rows, 1):
        start = f"{number:>3}. "
        end = f"   answer: {_cut(answer, _ANSWER_WIDTH, _ANSWER_WIDTH // 2)}" if answer else ""
        room, last_line = _WIDTH - cell_len(start + end), prompt.rpartition(_BREAK)[2]
        is_long = cell_len(last_line) > room
        lines.append(start + (_cut(last_line, room, room // 2) if is_long else _cut(prompt, room, 0)) + end)
        for name, reward, response in (("before", reward_before, before), ("after", reward_after, after)):
            if response:
                start = f"       {name:<6} {reward:>6}  "
                lines.append(start + _cut(response, _WIDTH - cell_len(start), _WIDTH // 2))
    return lines


def _line(text: str) -> str:
    """Return a text in one line, in which _BREAK stands for line breaks, without control characters."""
    lines = (" ".join(line.split()) for line in text.splitlines())
    return plain(_BREAK.join(line for line in lines if line))


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
