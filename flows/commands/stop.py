"""`tba stop`: ask the roles of a run to stop in an orderly way, from any machine that reaches its storage."""

import argparse
import math
import sys
from collections.abc import Callable

from flows.commands.arguments import DONE, RUN_HELP, explain, open_run
from flows.commands.scale import SHELVED, await_state
from flows.planning.run_summary import living, summarise
from flows.supervision.stopping import Stopping, forecast
from storage.runs.control import change_state
from storage.runs.lease_watch import LeaseWatch, Seen
from storage.runs.leases import SUPERVISOR, read_roles
from storage.runs.run import Run
from tba.config import Config, parse_known
from tba.errors import DeadlinePassed
from tba.runtime.waiting import looks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    explain(
        parser,
        "The trainer makes a checkpoint at the next sync, so no step is repeated when `tba resume` continues the run.",
        "example:\n  tba stop first",
    )
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--why", default="tba stop", metavar="TEXT", help="the reason that the run records")
    parser.add_argument("--no-wait", action="store_true", help="do not wait until all roles have stopped")


def command(options: argparse.Namespace) -> int:
    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    print(stop(open_run(options.run), options.why, wait=not options.no_wait, tell=tell))
    return DONE


def stop(run: Run, why: str, *, wait: bool = True, tell: Callable[[str], None] = lambda text: None) -> str:
    """Ask every role to stop in an orderly way, and return a message about the result. With `wait`, first call `tell`
    with how long the stop may take, and wait until all roles have stopped. Raise DeadlinePassed, with the names of the
    roles still at work, if they do not stop in time."""
    config = parse_known(run.config)
    await_state(run, config)
    summary, roles = summarise(run), read_roles(run)
    is_idle = summary.state in ("finished", "stopped", "failed") or (summary.state in SHELVED and not roles.damaged)
    if is_idle:  # a role whose lease cannot be read may still be at work
        return f"{run.name} is {summary.state}: there is nothing to stop"
    change_state(run, desired="stop", why=why)
    watch = LeaseWatch()
    needs, again = forecast(_at_work(run, config, watch)), f"`tba resume {run.url}` goes on from there"
    if not wait:
        return f"{run.name} was asked to stop{needs}; {again}"
    if needs:
        tell(f"{run.name} is stopping{needs}")
    return f"{_await_ends(run, config, watch)}; {again}"


def _await_ends(run: Run, config: Config, watch: LeaseWatch) -> str:
    """Wait until no role is at work, and return a message that says so. Raise DeadlinePassed if a role is still at work
    a while after the time that the supervisor gives to each role."""
    limits, stopping = config.limits, Stopping(config.limits)
    late: float | None = None  # seconds after which the time of every role was over
    for waited in looks(math.inf):
        left = _at_work(run, config, watch)
        if not left:
            return f"{run.name} has stopped"
        overs = [stopping.is_over(role, seen) for role, seen in left.items() if role != SUPERVISOR]
        late = (waited if late is None else late) if all(overs) else None
        if late is not None and waited > late + limits.stop_grace + limits.silent_after:
            raise DeadlinePassed(
                f"{', '.join(sorted(left))} of {run.url} still at work {waited:.0f} s after being asked to stop"
            )
    raise AssertionError("unreachable: the looks have no deadline")


def _at_work(run: Run, config: Config, watch: LeaseWatch) -> dict[str, Seen]:
    """Return the roles that are not known to have ended. A role whose lease cannot be read counts until its lease has
    not changed for `limits.silent_after` seconds."""
    seen, silent_after = watch.observe(run), config.limits.silent_after
    alive = {lease.role for lease in living([it.lease for it in seen.values()], silent_after)}
    return {
        role: it
        for role, it in seen.items()
        if (it.silent_for < silent_after if role in watch.damaged else role in alive)
    }
