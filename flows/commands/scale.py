"""`tba scale`: change the number of searchers of a run, from any machine that reaches its storage."""

import argparse
from contextlib import suppress

from flows.commands.arguments import DONE, RUN_HELP, explain, open_run
from flows.planning.run_summary import Summary, summarise
from storage.runs.control import change_state, check_state
from storage.runs.run import Run
from tba.config import Config, parse_known
from tba.errors import ConfigError, Damaged
from tba.runtime.waiting import looks

MOST_SEARCHERS = 1000  # the names of their leases have three digits
SHELVED = ("stopped", "failed", "interrupted", "new")  # nobody works on the run, `resume` continues it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    explain(
        parser,
        "Works from any machine that can reach the storage. The supervisor of the run starts the searchers that are\n"
        "missing; searchers that are too many stop after their current round. An interrupted run uses the new number\n"
        "when it is resumed. With 0 searchers a run trains on the responses that it has, and on what `tba import`\n"
        "brings.",
        "example:\n  tba scale first --searchers 4",
    )
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--searchers", type=int, required=True, metavar="N", help="the new number of searchers")


def command(options: argparse.Namespace) -> int:
    print(scale(open_run(options.run), options.searchers))
    return DONE


def scale(run: Run, searchers: int) -> str:
    """Change the wanted number of searchers, and return a message about the result. The supervisor and the searchers
    read the new number from storage by themselves."""
    config = parse_known(run.config)
    await_state(run, config)
    summary = summarise(run)
    _refuse(run, config, summary, searchers)
    change_state(run, searchers=searchers)
    if summary.state in SHELVED:
        return f"{run.name} is {summary.state}: `tba resume {run.url}` goes on with {searchers} searcher(s)"
    return f"{run.name}: {searchers} searcher(s) wanted, {summary.searchers} at work; `tba watch {run.url}` shows them"


def _refuse(run: Run, config: Config, summary: Summary, searchers: int) -> None:
    if not 0 <= searchers <= MOST_SEARCHERS:
        raise ConfigError(f"--searchers: must be between 0 and {MOST_SEARCHERS}, got {searchers}")
    if summary.state in ("finished", "stopping", "unreadable"):
        raise ConfigError(f"run {run.name!r} is {summary.state}: its number of searchers cannot be changed")
    if run.inherits and run.inherits.replays:
        raise ConfigError(f"run {run.name!r} is a replay, which learns without searchers")
    if config.sync.lag is not None and searchers != config.search.searchers:
        raise ConfigError(
            f"--searchers: must stay {config.search.searchers} if sync.lag is set, because the trainer waits for a "
            f"round of each searcher, got {searchers}"
        )


def await_state(run: Run, config: Config) -> None:
    """If the wanted state is damaged, wait for a living supervisor to restore it, for up to three renewal periods of a
    lease. If the state stays damaged, raise Damaged, which says what to do."""
    for _ in looks(3 * config.limits.lease_every):
        with suppress(Damaged):
            return check_state(run)
    check_state(run)
