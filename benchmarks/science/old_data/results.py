"""The tables and the chart of a study, from the rows of its CSV alone. What was not run is shown as missing."""

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from statistics import fmean, median

from benchmarks.harness.rows import line, spread
from benchmarks.science.old_data.arms import (
    ARMS,
    LAGS,
    PROMPTS,
    RESPONSES,
    SEEDS,
    Row,
    Study,
    make_run,
    progress,
    scores,
    search_of,
)
from benchmarks.science.old_data.intervals import interval
from benchmarks.science.old_data.local_search import Point
from flows.pages.charts import Chart

OURS = "TB, weighted, half from all data, not tuned"
DRAWN = (OURS, "TB", "TB, weighted", "Proximal TB", "TBA'", "Dr. GRPO", "M2PO", "PPO")
"""The arms of the chart, which has eight colours."""
MISSING, LEVEL = "–", 0.95
PER_STEP = PROMPTS * RESPONSES  # trajectories


@dataclass(frozen=True)
class Cell:
    """An arm at a lag: the progress of its search, and the rows of the chosen setting on the reported seeds."""

    chosen: Point | None  # None until the search has ended
    tried: int  # number of runs of the search
    failed: int  # of the search's runs with the chosen setting
    tuned: float | None  # mean result of these runs; None without a search
    rows: Sequence[Row]


Cells = Mapping[tuple[str, int], Cell]
Text = Callable[[str, int], str]
"""A function that returns the text of a table's cell from an arm and a lag. An empty text stands for a missing one."""


def cells_of(study: Study, rows: Sequence[Row]) -> Cells:
    """Return a cell for every arm and lag, also for those without rows."""
    return {(name, lag): _cell(study, rows, name, lag) for name, lag in product(ARMS, LAGS)}


def _cell(study: Study, rows: Sequence[Row], name: str, lag: int) -> Cell:
    best, more = progress(study, rows, name, lag)
    tried = sum(map(len, scores(study, rows, name, lag).values()))
    if more:
        return Cell(None, tried, 0, None, [])
    own = [row for row in rows if (row.arm, row.lag) == (name, lag) and row.key == make_run(name, lag, row.seed, best)]
    search = [row for row in own if row.seed not in SEEDS]
    failed, tuned = sum(bool(row.failed) for row in search), fmean(row.result for row in search) if search else None
    return Cell(best, tried, failed, tuned, [row for row in own if row.seed in SEEDS])


def markdown(study: Study, rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of all tables, each with a title and an explanation."""
    cells = cells_of(study, rows)
    yield from _not_measured(cells)
    yield from _results(study, cells)
    yield from _settings(study, cells)
    yield from _leads(study, cells)
    if study.goal is not None:
        yield from _costs(study, study.goal, cells)


def picture(study: Study, rows: Sequence[Row]) -> str:
    """Return a chart of the results by lag. Empty if nothing is there to draw."""
    cells = cells_of(study, rows)
    lines = [
        line(name, {math.log2(lag + 1): [row.result for row in cells[name, lag].rows] for lag in LAGS})
        for name in DRAWN
    ]
    title = f"{_said(study)} after {study.steps * PER_STEP:,} trajectories"
    return Chart(title, [it for it in lines if it.points], x_name="log2(lag + 1)").picture()


def _section(title: str, text: str) -> Iterator[str]:
    yield from ("", f"### {title}", "", *_wrapped(text), "")


def _table(head: str, names: Sequence[str], lags: Sequence[int], text: Text) -> Iterator[str]:
    names = [name for name in names if any(text(name, lag) for lag in lags)]
    if not names:
        yield "Nothing of this has been run yet."
        return
    yield f"| {head} | {' | '.join(f'lag {lag}' for lag in lags)} |"
    yield "|---|" + "---:|" * len(lags)
    for name in names:
        yield f"| {name} | {' | '.join(text(name, lag) or MISSING for lag in lags)} |"


def _wrapped(text: str, *, indent: str = "") -> list[str]:
    return textwrap.wrap(text, 120, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def _seeds(number: int) -> str:
    return f"{number} seed{'s' if number > 1 else ''}"


def _said(study: Study) -> str:
    return study.result.replace("_", " ")


# --- what is missing --------------------------------------------------------------------------------------------------


def _not_measured(cells: Cells) -> Iterator[str]:
    there = _measured(cells)
    yield from _section(
        "Not measured yet",
        f"`{MISSING}` in a table means that nothing has been run. An arm without a result has no row in a table.",
    )
    if absent := [name for name in ARMS if name not in there]:
        yield from _wrapped(f"- *At no lag*: {'; '.join(absent)}", indent="  ")
    gaps = {name: [gap for lag in LAGS if (gap := _gap(lag, cells[name, lag]))] for name in there}
    for name in there:
        if gaps[name]:
            yield from _wrapped(f"- *{name}*: {'; '.join(gaps[name])}", indent="  ")
    if not absent and not any(gaps.values()):
        yield "Every search that has begun has ended, and its choice has been run on all seeds."


def _measured(cells: Cells) -> list[str]:
    """Return the arms that have been run at any lag."""
    return [name for name in ARMS if any(cells[name, lag].tried or cells[name, lag].rows for lag in LAGS)]


def _gap(lag: int, cell: Cell) -> str:
    """Return what is missing at a lag where something has been run, or an empty text."""
    if not cell.tried and not cell.rows:
        return ""
    if cell.chosen is None:
        return f"lag {lag} (search not ended)"
    return f"lag {lag} ({len(cell.rows)} of {len(SEEDS)} seeds)" if len(cell.rows) < len(SEEDS) else ""


# --- results and settings ---------------------------------------------------------------------------------------------


def _results(study: Study, cells: Cells) -> Iterator[str]:
    yield from _section(
        "Result by lag",
        f"The result is `{_said(study)}` after {study.steps * PER_STEP:,} trajectories, "
        f"{'higher' if study.sign > 0 else 'lower'} is better. The table shows mean and standard error over "
        f"{len(SEEDS)} seeds, or over as many as the cell says. A run that failed counts with its last result.",
    )
    yield from _table(_said(study), _measured(cells), LAGS, lambda name, lag: _result(cells[name, lag]))


def _result(cell: Cell) -> str:
    if not cell.rows:
        return ""
    failed = sum(bool(row.failed) for row in cell.rows)
    marks = [_seeds(len(cell.rows))] if len(cell.rows) < len(SEEDS) else []
    marks += [f"{failed} failed"] if failed else []
    return spread([row.result for row in cell.rows]) + (f" ({', '.join(marks)})" if marks else "")


def _settings(study: Study, cells: Cells) -> Iterator[str]:
    yield from _section(
        "Chosen settings",
        "The learning rate, and the second setting of an arm that has one. *Edge* marks the first or last value of a "
        "ladder: a better one may lie outside. *Searching* says how many runs a search has made that has not ended.",
    )
    head = "learning rate, second setting"
    yield from _table(head, _measured(cells), LAGS, lambda name, lag: _setting(study, name, cells[name, lag]))
    yield from _section(
        "Results on the seeds of the search",
        "The mean result of the chosen setting on the seeds that chose it. It is too good, because the best of several "
        "settings was chosen, and it is all that is known of an arm until the reported seeds have been run.",
    )
    yield from _table(_said(study), _measured(cells), LAGS, lambda name, lag: _tuned(cells[name, lag]))


def _tuned(cell: Cell) -> str:
    return "" if cell.tuned is None else f"{cell.tuned:.3f}"


def _setting(study: Study, name: str, cell: Cell) -> str:
    if cell.chosen is None:
        return f"searching, {cell.tried} runs" if cell.tried else ""
    if not cell.tried and not cell.rows:
        return ""
    values = [
        f"{ladder.values[rung]:g}" + (" edge" if len(ladder.values) > 1 and rung in (0, len(ladder.values) - 1) else "")
        for ladder, rung in zip(search_of(study, name).ladders, cell.chosen, strict=True)
        if ladder.setting
    ]
    return ", ".join(values) + (f" ({cell.failed} of its runs failed)" if cell.failed else "")


# --- paired differences -----------------------------------------------------------------------------------------------


def _leads(study: Study, cells: Cells) -> Iterator[str]:
    names = [name for name in _measured(cells) if name != OURS]
    others = {(name, lag): _lead(study, cells[OURS, lag], cells[name, lag]) for name, lag in product(names, LAGS)}
    yield from _section(
        "Ahead of every other arm", f"How far *{OURS}* is ahead of each arm at the same lag, {_explained(others)}"
    )
    yield from _table("ahead of", names, LAGS, _interval_text(others))
    own = {(OURS, lag): _lead(study, cells[OURS, lag], cells[OURS, 0]) for lag in LAGS[1:]}
    yield from _section(
        "Against its own result on policy", f"How far *{OURS}* at a lag is ahead of itself at lag 0, {_explained(own)}"
    )
    yield from _table("ahead of itself at lag 0", [OURS], LAGS[1:], _interval_text(own))


def _lead(study: Study, ours: Cell, other: Cell) -> list[float]:
    results = {row.seed: row.result for row in other.rows}
    return [study.sign * (row.result - results[row.seed]) for row in ours.rows if row.seed in results]


def _explained(leads: Mapping[tuple[str, int], Sequence[float]]) -> str:
    number = _compared(leads)
    comparisons = f"Bonferroni, {number} comparisons" if number else "Bonferroni"
    return (
        "seed by seed, on the seeds that both have. Below 0 it is behind. ± is half of an interval by Student's t over "
        f"these pairs. All intervals of the table together hold at a level of {LEVEL:.0%} ({comparisons}). A bold "
        "interval does not contain 0. A single pair has no interval."
    )


def _compared(leads: Mapping[tuple[str, int], Sequence[float]]) -> int:
    return sum(len(values) > 1 for values in leads.values())


def _interval_text(leads: Mapping[tuple[str, int], Sequence[float]]) -> Text:
    comparisons = _compared(leads)

    def text(name: str, lag: int) -> str:
        values = leads[name, lag]
        few = f" ({_seeds(len(values))})" if len(values) < len(SEEDS) else ""
        if len(values) < 2:
            return f"{_signed(values[0])}{few}" if values else ""
        found = interval(values, level=LEVEL, comparisons=comparisons)
        shown = f"{_signed(found.mean)} ± {found.half:.3f}"
        return (f"**{shown}**" if found.excludes_zero else shown) + few

    return text


def _signed(value: float) -> str:
    return f"{value:z.3f}"  # without a sign before zero


# --- costs ------------------------------------------------------------------------------------------------------------


def _costs(study: Study, goal: float, cells: Cells) -> Iterator[str]:
    columns: Mapping[str, tuple[str, Callable[[Row, float], float]]] = {
        f"Trajectories to {goal:.2f}": (
            f"A step learns from {PER_STEP} trajectories.", lambda row, steps: PER_STEP * steps
        ),
        f"CPU seconds to {goal:.2f}": (
            "The time of a run, with its examinations, in proportion to its steps. Runs shared a machine with other "
            "work, so these are rough.",
            lambda row, steps: row.cpu_seconds * steps / points_of(row.curve)[-1][0],
        ),
    }  # fmt: skip
    for title, (text, cost) in columns.items():
        yield from _section(
            title,
            f"The cost until `{_said(study)}` first reaches {goal:.2f}, interpolated between examinations: the median "
            f"over seeds, where a seed that does not reach it counts as infinite. {text}",
        )
        yield from _table(f"to {goal:.2f}", _measured(cells), LAGS, _cost_text(study, goal, cells, cost))


def _cost_text(study: Study, goal: float, cells: Cells, cost: Callable[[Row, float], float]) -> Text:
    def text(name: str, lag: int) -> str:
        rows = cells[name, lag].rows
        if not rows:
            return ""
        steps = [(row, steps_to(row.curve, goal, study.sign)) for row in rows]
        reached = [cost(row, it) for row, it in steps if it is not None]
        middle = median([*reached, *[math.inf] * (len(rows) - len(reached))])
        shown = f"{middle:,.0f}" if math.isfinite(middle) else "not reached"
        if len(reached) < len(rows):
            return f"{shown} ({len(reached)} of {_seeds(len(rows))} reach it)"
        return shown if len(rows) == len(SEEDS) else f"{shown} ({_seeds(len(rows))})"

    return text


def steps_to(curve: str, goal: float, sign: int = 1) -> float | None:
    """Return the step at which a curve first reaches the goal, interpolated between its points, or None. If the first
    point is past the goal, return its step: where the curve came from is not known."""
    points = [(step, sign * value) for step, value in points_of(curve)]
    goal *= sign
    if points and points[0][1] >= goal:
        return points[0][0]
    for (before, low), (after, high) in pairwise(points):
        if low < goal <= high:
            return before + (after - before) * (goal - low) / (high - low)
    return None


def points_of(curve: str) -> list[tuple[int, float]]:
    """Return the step and result of each point of a row's curve."""
    return [(int(step), float(value)) for step, value in (point.split(":") for point in curve.split())]
