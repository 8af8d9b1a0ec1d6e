"""`tba watch`: show the state of a run in 80 columns, read from its storage alone."""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import duckdb
from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from flows.commands.arguments import DONE, RUN_HELP, explain, open_run, parse_seconds
from flows.commands.watch_queries import (
    ALARMS,
    BUFFER,
    EVALUATING,
    GROWTH,
    LAST_EVENTS,
    LAST_STEP,
    NEWEST_AGES,
    NEWEST_REWARDS,
    NEWEST_SHARDS,
    RECENT_TIME,
    SCORES,
)
from flows.escaping import plain
from flows.pages.values import number
from flows.planning.run_summary import Summary, living, summarise
from flows.progress import bar
from flows.queries.damage_report import damage_of, warn
from storage import layout
from storage.objects.damage import DamageLog
from storage.queries.views import connect
from storage.runs.control import State, read_state
from storage.runs.leases import Lease, read_leases
from storage.runs.run import Run
from tba.config import Config, parse_known

WIDTH = 80
ENDED = ("finished", "stopped", "failed")
_LINES = 4  # most searchers with a line each; more than these share one line
_COLOURS = {"warning": "yellow", "error": "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    explain(
        parser,
        "Reads only the storage of the run, so it works from any machine that can reach it. Ctrl-C ends the display,\n"
        "not the run. Into a file or a pipe it prints a line whenever something has changed.",
        "example:\n  tba watch first",
    )
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--once", action="store_true", help="print the state once and end")
    parser.add_argument(
        "--every",
        type=parse_seconds,
        default=3.0,
        metavar="SECONDS",
        help="seconds between two updates (default: %(default)s)",
    )


def command(options: argparse.Namespace) -> int:
    watch(open_run(options.run), once=options.once, every=options.every)
    return DONE


@dataclass
class View:
    """The data of one picture of a run. A picture is what `tba watch` shows at one time."""

    run: Run
    config: Config
    summary: Summary
    state: State  # the state that people want the run to have
    leases: list[Lease]
    damaged: list[str]  # what is wrong with each lease or wanted state that cannot be read
    con: duckdb.DuckDBPyConnection = field(repr=False)

    def row(self, query: str) -> dict[str, Any]:
        """Return the first row of an answer by column; empty if the answer has no rows."""
        found = self.con.execute(query)
        names = [column[0] for column in found.description or ()]
        rows = found.fetchall()
        return dict(zip(names, rows[0], strict=True)) if rows else {}

    def values(self, query: str) -> tuple[Any, ...]:
        return self.con.execute(query).fetchall()[0]

    def newest_rewards(self) -> tuple[Any, ...]:
        """Return the mean reward, number of rows, newest version, mean length and share of finished responses in the
        newest shard of each searcher. No other shards are opened."""
        # In a replay, waiting shards are those that the parent admitted later; they are left out.
        waiting = "admitted" if self.replays else "waiting"
        newest = self.con.execute(NEWEST_SHARDS, {"waiting": waiting}).fetchall()
        if not newest:
            return (None, 0, None, None, None)
        searchers, seqs = (", ".join(map(str, sorted(set(of)))) for of in zip(*newest, strict=True))
        query = NEWEST_REWARDS.format(searchers=searchers, seqs=seqs, newest=", ".join(map(str, newest)))
        return self.values(query)

    @property
    def replays(self) -> bool:
        return bool(self.run.inherits and self.run.inherits.replays)


def watch(run: Run, *, once: bool = False, every: float) -> None:
    """Show the run until it has ended or the person leaves; show it only once if `once` is set."""
    console = Console(highlight=False)
    console = Console(width=min(console.width, WIDTH), highlight=False)
    with bar("copying what is new") as tell:
        view = look(run, tell)
    warn(run, view.con)
    if once:
        console.print(picture(view))
    elif console.is_interactive:
        _draw(run, view, console, every)
    else:
        _print_lines(run, view, every)


def _draw(run: Run, view: View, console: Console, every: float) -> None:
    with Live(picture(view), console=console, auto_refresh=False) as live:
        while view.summary.state not in ENDED:
            time.sleep(every)
            view = look(run)
            live.update(picture(view), refresh=True)


def _print_lines(run: Run, view: View, every: float) -> None:
    """Print a line whenever something has changed, for a file or a pipe."""
    told = ""
    while True:
        if (text := line(view)) != told:
            print(f"{datetime.now():%H:%M:%S}  {text}", flush=True)
            told = text
        if view.summary.state in ENDED:
            return
        time.sleep(every)
        view = look(run)


def look(run: Run, progress: Any = None) -> View:
    config, damage, state = parse_known(run.config), DamageLog(), State()
    leases = living(read_leases(run, damage.looking_at), config.limits.silent_after)
    with damage.looking_at(layout.STATE):
        state = read_state(run)
    damaged = [f"{it.key} {it.problem}" for it in damage.found()]
    return View(run, config, summarise(run), state, leases, damaged, connect(run, progress=progress))


def picture(view: View) -> RenderableType:
    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="bold", no_wrap=True)
    lines.add_column(overflow="fold")
    for name, content in (
        ("learning", _learning(view)),
        ("reward", _reward(view)),
        ("ages", _ages(view)),
        ("trainer", _trainer(view)),
        *_searchers([it for it in view.leases if it.role.startswith("searcher")]),
        ("evaluator", _evaluator(view)),
        ("buffer", _buffer(view)),
        *_scores(view),
    ):
        if content:
            lines.add_row(Text(plain(name)), Text(plain(content)))
    wrong = (*_damaged(view), *_damage(view), *_alarms(view))
    return Group(_head(view), _progress(view), *wrong, Text(), lines, Text(), *_events(view))


def line(view: View) -> str:
    """Return the state of the run in one line, without values that change even if nothing happens."""
    summary, reward, age = view.summary, view.row(LAST_STEP).get("reward_mean"), view.values(NEWEST_AGES)[0]
    parts = [
        summary.state,
        f"step {summary.step or 0} of {view.config.training.steps}",
        "" if summary.version is None else f"version {summary.version}",
        "" if reward is None else f"reward {reward:.3f}",
        "" if age is None else f"age {age:.1f}",
        *(f"{metric} {values[-1]}" for metric, values in _values_by_metric(view).items()),
        *(f"damaged: {damage}" for damage in view.damaged),
    ]
    return "  ".join(filter(None, parts))


# --- lines of the picture ---------------------------------------------------------------------------------------------


def _head(view: View) -> Text:
    summary = view.summary
    colour = {"running": "green", "finished": "green", "failed": "red"}.get(summary.state, "yellow")
    why = f"\n{plain(view.state.why)}" if summary.state in ("stopping", "stopped", "failed") else ""
    version = "no version yet" if summary.version is None else f"version {summary.version}"
    parent = f"  fork of {summary.parent}" if summary.parent else ""
    is_alone = view.replays or summary.state in ENDED
    searchers = "" if is_alone else f"  {summary.searchers} of {view.state.searchers} searchers"
    return Text.assemble(
        (view.run.name, "bold"), f"  {summary.task}  ", (summary.state, colour), f"  {version}{searchers}{parent}",
        (why, colour),
    )  # fmt: skip


def _progress(view: View) -> RenderableType:
    step, steps = view.summary.step or 0, view.config.training.steps
    line = Table.grid(padding=(0, 2), expand=True)
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True)
    line.add_row(f"step {step} of {steps}", Bar(steps, 0, step, color="green"), f"{step / steps:.0%}{_to_go(view)}")
    return line


def _to_go(view: View) -> str:
    """Return the remaining time, estimated from the mean duration of the last steps; empty if it is unknown."""
    *_, seconds = view.values(RECENT_TIME)
    left = view.config.training.steps - (view.summary.step or 0)
    if view.summary.state != "running" or seconds is None or left <= 0:
        return ""
    minutes = round(left * seconds / 60)
    hours = f"{minutes // 60} h " if minutes >= 60 else ""
    return f", {hours}{minutes % 60} min to go" if minutes else f", {left * seconds:.0f} s to go"


def _learning(view: View) -> str:
    last = view.row(LAST_STEP)
    names = {"loss": "loss", "residual_abs": "|residual|", "log_z": "log Z", "grad_norm": "grad", "beta": "beta"}
    return "  ".join(f"{label} {number(last[name])}" for name, label in names.items() if last.get(name) is not None)


def _reward(view: View) -> str:
    reward, rows, version, length, finished = view.newest_rewards()
    last = view.row(LAST_STEP).get("reward_mean")
    parts = [] if last is None else [f"last batch {last:.3f}"]
    if rows:
        parts.append(f"newest {rows} {reward:.3f} (version {version}, {length:.0f} tokens, {finished:.0%} ended)")
    return "  ".join(parts)


def _ages(view: View) -> str:
    mean, oldest, recent = view.values(NEWEST_AGES)
    return "" if mean is None else f"mean {mean:.1f} steps  oldest {oldest}  recent {recent:.0%} of draws"


def _trainer(view: View) -> str:
    waits, tokens, seconds = view.values(RECENT_TIME)
    told = _status_of(view, "trainer")
    if seconds is None:
        return told
    spent = f"idle {waits or 0:.1%}  {seconds:.2f} s a step" + (f"  {tokens:,.0f} tokens/s" if tokens else "")
    return f"{spent}  {told}" if told else spent


def _searchers(leases: Sequence[Lease]) -> list[tuple[str, str]]:
    """Return a line for each searcher. For many searchers, return one line for all and one for the searcher that spends
    the smallest share of its time generating."""
    spent = {lease.role: _spent(lease) for lease in leases}
    busy = [(share, lease) for lease in leases if (share := spent[lease.role][0]) is not None]
    if len(leases) <= _LINES or not busy:
        return [(lease.role, _searcher(lease, *spent[lease.role])) for lease in leases[:_LINES]]
    (least, slowest), most = min(busy, key=lambda it: it[0]), max(share for share, _ in busy)
    tokens = sum(tokens or 0.0 for _, tokens in spent.values())
    together = f"{len(leases)} generate {least:.0%} to {most:.0%} of their time  {tokens:,.0f} tokens/s"
    return [("searchers", together), (slowest.role, _searcher(slowest, *spent[slowest.role]))]


def _spent(lease: Lease) -> tuple[float | None, float | None]:
    """Return two numbers about the whole life of a searcher, as its lease reports them: the share of the time in which
    it generates, and its tokens per second. Both are None before the lease reports any time."""
    progress = lease.progress
    total = sum(seconds for name, seconds in progress.items() if name.startswith("seconds_"))
    if not total:
        return None, None
    return progress.get("seconds_generate", 0.0) / total, progress.get("tokens", 0.0) / total or None


def _searcher(lease: Lease, share: float | None, tokens: float | None) -> str:
    parts = [] if share is None else [f"generates {share:.0%} of its time"]
    parts += [] if tokens is None else [f"{tokens:,.0f} tokens/s"]
    return "  ".join([*parts, lease.status])


def _evaluator(view: View) -> str:
    """Return the evaluator's idle share and status. Its busy time is the time spent on the versions that it has scored
    in this life."""
    told = _status_of(view, "evaluator")
    [busy] = view.values(EVALUATING)
    return f"idle {max(0.0, 1 - busy):.0%}  {told}" if told and busy is not None else told


def _status_of(view: View, role: str) -> str:
    return next((lease.status for lease in view.leases if lease.role == role), "")


def _buffer(view: View) -> str:
    admitted, waiting, shards, sync, bad = view.values(BUFFER)
    text = f"{admitted:,} trajectories in {shards:,} shards  {waiting:,} {'to come' if view.replays else 'waiting'}"
    growth = {} if view.replays or view.summary.state in ENDED else view.row(GROWTH)
    if growth:
        text += f"  {growth['a_minute']:+,.0f}/min"
    else:
        text += "" if sync is None else f"  sync {sync}"
    return text + (f"  {bad} refused or damaged" if bad else "")


def _scores(view: View) -> list[tuple[str, str]]:
    """Return the first score and the newest scores of each metric."""
    return [(metric, "  ".join(_ends(values))) for metric, values in _values_by_metric(view).items()]


def _values_by_metric(view: View) -> dict[str, list[str]]:
    """Return the scores of each metric as texts of the form `version: value`."""
    found: dict[str, list[str]] = {}
    for metric, version, value in view.con.execute(SCORES).fetchall():
        found.setdefault(metric, []).append(f"{version}: {value:.3f}")
    return found


def _ends(values: Sequence[str]) -> list[str]:
    return list(values) if len(values) <= 6 else [values[0], "…", *values[-4:]]


def _damaged(view: View) -> list[Text]:
    return [Text(f"! damaged: {plain(damage)}", f"bold {_COLOURS['error']}") for damage in view.damaged]


def _alarms(view: View) -> list[Text]:
    """Return a line for each alarm that is not over. A run that has ended shows no alarms."""
    rows = [] if view.summary.state in ENDED else view.con.execute(ALARMS).fetchall()
    return [Text(f"! {kind}: {plain(message)}", f"bold {_COLOURS[severity]}") for kind, message, severity in rows]


def _damage(view: View) -> list[Text]:
    if not (damage := damage_of(view.con)):
        return []
    more = f" and {len(damage) - 1} more" if len(damage) > 1 else ""
    return [Text(plain(f"! damaged or missing: {damage[0].key}{more}; tba check names all"), "bold red")]


def _events(view: View) -> list[Text]:
    rows = view.con.execute(LAST_EVENTS).fetchall()
    return [
        Text(
            f"{at:%H:%M:%S}  {role}  {kind}: {plain(message)}",
            _COLOURS.get(severity, "dim"),
            no_wrap=True,
            overflow="ellipsis",
        )
        for at, role, kind, message, severity in reversed(rows)
    ]
