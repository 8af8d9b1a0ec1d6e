"""`tba scale` and `tba stop`: what a person wants of a run, from any machine that reaches its storage."""

from flows.runs import Summary, living, summarise
from storage.control import change_state
from storage.leases import read_leases
from storage.run import Run
from tba.config import Config, parse_known
from tba.errors import ConfigError, DeadlinePassed
from tba.timing import looks

MOST_SEARCHERS = 1000  # their leases have numbers of three digits
SHELVED = ("stopped", "failed", "interrupted", "new")  # states of a run that nobody is at work on and `resume` goes on


def scale(run: Run, searchers: int) -> str:
    """Change how many searchers there should be; returns what comes of it. They hear of it by themselves."""
    config, summary = parse_known(run.config), summarise(run)
    _refuse(run, config, summary, searchers)
    change_state(run, searchers=searchers)
    if summary.state in SHELVED:
        return f"{run.name} is {summary.state}: `tba resume {run.url}` goes on with {searchers} searcher(s)"
    return f"{run.name}: {searchers} searcher(s) wanted, {summary.searchers} at work; `tba watch {run.url}` shows them"


def _refuse(run: Run, config: Config, summary: Summary, searchers: int) -> None:
    if not 0 <= searchers <= MOST_SEARCHERS:
        raise ConfigError(f"--searchers: between 0 and {MOST_SEARCHERS}, got {searchers}")
    if summary.state in ("finished", "stopping", "unreadable"):
        raise ConfigError(f"run {run.name!r} is {summary.state}: searchers would be of no use to it")
    if run.inherits and run.inherits.replays:
        raise ConfigError(f"run {run.name!r} is a replay, which learns without searchers")
    if config.sync.lag is not None and searchers != config.search.searchers:
        raise ConfigError(
            f"--searchers: the trainer waits for each of {config.search.searchers} where sync.lag is set, "
            f"got {searchers}"
        )


def stop(run: Run, why: str, *, wait: bool = True) -> str:
    """Ask every role to stop in order, and wait until they have; returns what came of it. DeadlinePassed, naming
    those that live, if they do not."""
    config, summary = parse_known(run.config), summarise(run)
    if summary.state in ("finished", *SHELVED):
        return f"{run.name} is {summary.state}: there is nothing to stop"
    change_state(run, desired="stop", why=why)
    again = f"`tba resume {run.url}` goes on from there"
    if not wait:
        return f"{run.name} was asked to stop; {again}"
    deadline = 2 * config.limits.stop_grace + config.limits.silent_after
    left: list[str] = []
    for _ in looks(deadline):
        left = sorted(lease.role for lease in living(read_leases(run), config.limits.silent_after))
        if not left:
            return f"{run.name} has stopped; {again}"
    raise DeadlinePassed(f"{', '.join(left)} of {run.url} still at work {deadline:.0f} s after being asked to stop")
