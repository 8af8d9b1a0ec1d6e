"""`tba report RUN RUN …`: several runs on one page. Each chart has one line for each run that has data for it."""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import duckdb
from markupsafe import Markup

from flows.pages.charts import Chart, Series
from flows.pages.report.curves import BRANCHES, BY_VERSION, SCORES, STEPS
from flows.pages.report.document import clock, damage_table, document, save
from flows.pages.report.page import TOTALS
from flows.pages.report.settings import comparable_settings
from flows.pages.tables import Table, ask
from flows.pages.values import number
from flows.planning.run_summary import Summary, summarise
from flows.progress import bar
from flows.queries.damage_report import is_inside_an_object, warn
from storage.objects.damage import Damage
from storage.queries.views import connect
from storage.runs.run import Run
from tba.errors import ConfigError

OUTPUT = "comparison.html"

_OF_STEPS = {
    "Reward of batches": "reward_mean",
    "Loss": "loss",
    "Mean absolute residual": "residual_abs",
    "log Z": "log_z",
    "log π − log π_ref of batches": "log_ratio_mean",
    "Gradient norm": "grad_norm",
    "Learning rate": "lr",
    "beta": "beta",
}
_OF_VERSIONS = {
    "Reward of trajectories, by version": "reward",
    "Response length, by version": "length",
    "Share of finished responses": "finished",
}
_OF_BRANCHES = {
    "Age of prioritised draws, in steps": "age_prioritised",
    "Share of draws from the newest sync": "recent",
}
_OF_TIME = {"Seconds per step": "seconds_step", "Seconds of waiting for data, per step": "seconds_wait"}


@dataclass(frozen=True)
class _Compared:
    """A run with the answers to the queries about it."""

    name: str
    run: Run
    summary: Summary
    con: duckdb.DuckDBPyConnection
    scores: Table
    steps: Table
    versions: Table
    branches: Table
    damage: list[Damage]


def write(runs: Sequence[Run], output: str | None = None) -> Path:
    return save(render(runs), Path(output or OUTPUT))


def render(runs: Sequence[Run]) -> Markup:
    try:
        return _render(runs)
    except duckdb.Error as error:
        if not is_inside_an_object(error):
            raise
        return _render(runs, thorough=True)


def _render(runs: Sequence[Run], *, thorough: bool = False) -> Markup:
    if len({run.url for run in runs}) < len(runs):
        raise ConfigError("RUN: the same run is named twice")
    names = [run.name for run in runs]
    told = names if len(set(names)) == len(names) else [run.url for run in runs]
    with ExitStack() as stack:
        compared = [_ask(name, run, stack, thorough=thorough) for name, run in zip(told, runs, strict=True)]
        return document(
            "comparison.html",
            " · ".join(told),
            _groups(compared),
            [clock(it.con) for it in compared],
            names=told,
            damage=[(it.name, damage_table(it.damage)) for it in compared],
            runs=_overview(compared),
            settings=_settings(compared),
        )


def _ask(name: str, run: Run, stack: ExitStack, *, thorough: bool) -> _Compared:
    with bar(f"copying what is new of {run.name}") as tell:
        con = stack.enter_context(closing(connect(run, progress=tell, thorough=thorough)))
    scores, steps, versions, branches = (ask(con, query) for query in (SCORES, STEPS, BY_VERSION, BRANCHES))
    return _Compared(name, run, summarise(run), con, scores, steps, versions, branches, warn(run, con))


# --- parts of the page ----------------------------------------------------------------------------------------------


def _overview(compared: Sequence[_Compared]) -> Table:
    metrics = list(dict.fromkeys(metric for it in compared for metric in it.scores.column("metric")))
    columns = ["run", "task", "fork of", "state", "steps", *metrics, "trajectories", "tokens generated", "trained for"]
    return Table(columns, [tuple(_row(it, metrics)) for it in compared])


def _row(it: _Compared, metrics: Sequence[str]) -> list[str | int]:
    trajectories, _, _, tokens, *_ = ask(it.con, TOTALS).rows[0]
    values = {metric: [value for name, _, value in it.scores.rows if name == metric] for metric in metrics}
    scores = [
        f"{number(found[0])}\N{NO-BREAK SPACE}→\N{NO-BREAK SPACE}{number(found[-1])}" if found else ""
        for found in values.values()
    ]
    summary, seconds = it.summary, clock(it.con)[1][-1]
    spent = f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 3600:.2f} h"
    last = max(it.steps.column("step"), default=0)
    return [it.name, summary.task, summary.parent, summary.state, last, *scores, trajectories, int(tokens or 0), spent]


def _groups(compared: Sequence[_Compared]) -> dict[str, list[Chart]]:
    return {
        "Learning": [*_scores(compared), *_of(compared, "steps", _OF_STEPS)],
        "Data": [*_of(compared, "versions", _OF_VERSIONS), *_of(compared, "branches", _OF_BRANCHES)],
        "Speed": _of(compared, "steps", _OF_TIME),
    }


def _scores(compared: Sequence[_Compared]) -> list[Chart]:
    drawn: list[Chart] = []
    for metric in dict.fromkeys(metric for it in compared for metric in it.scores.column("metric")):
        lines = [
            Series(it.name, [(step, value) for name, step, value in it.scores.rows if name == metric], True, run=n)
            for n, it in enumerate(compared)
        ]
        drawn.append(Chart(f"Score of versions: {metric}", lines, shared=True))
    return drawn


def _of(compared: Sequence[_Compared], table: str, titles: dict[str, str]) -> list[Chart]:
    x = "version_step" if table == "versions" else "step"
    return [
        Chart(
            title,
            [Series(it.name, getattr(it, table).points(name, x=x), run=n) for n, it in enumerate(compared)],
            shared=True,
        )
        for title, name in titles.items()
    ]


def _settings(compared: Sequence[_Compared]) -> Table:
    """Return a table of the settings that differ between the runs, with the value of each run."""
    settings = [comparable_settings(it.run) for it in compared]
    names = sorted({name for of in settings for name in of})
    rows = [(name, *(of.get(name, "–") for of in settings)) for name in names]
    return Table(["setting", *(it.name for it in compared)], [row for row in rows if len(set(row[1:])) > 1])
