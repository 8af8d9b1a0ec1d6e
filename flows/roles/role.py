"""One role as a plain process: `python -m flows.roles.role searcher --run URL --index 0`.

Exit codes: 0 finished, 1 failed, 2 the settings or the data do not allow the work, 3 another life of the role has taken
over, 4 stopped on request, 5 waited too long for another role.
"""

import argparse
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

from flows.roles.threads import switch_soon, use_threads
from flows.supervision.gpus import held_devices, memory_warnings
from flows.supervision.processes import FAILED, FINISHED, GAVE_UP, LOG_FORMAT, MISUSED, STOPPED, SUPERSEDED
from storage import layout
from storage.maintenance.leftovers import sweep
from storage.runs.events import Events
from storage.runs.held_lease import HeldLease
from storage.runs.run import Run
from tba.config import Config, parse
from tba.errors import ConfigError, DataError, DeadlinePassed, Stopped, Superseded, TBAError

if TYPE_CHECKING:
    from tba.distributed.world import World

log = logging.getLogger("tba")

SWEPT_BY = {"trainer": lambda index: "", "searcher": layout.searcher_folder}
"""For each kind of role, a function from the index of a role to the folder in which the role removes old unfinished
writes of killed processes. The empty folder name means the whole run. Evaluators remove nothing."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flows.roles.role", description="Run one role of a run.")
    parser.add_argument("role", choices=["searcher", "trainer", "evaluator"])
    parser.add_argument("--run", required=True, help="path or URL of the run's folder")
    parser.add_argument("--index", type=int, default=0, help="which searcher (default 0)")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    return run_role(options.role, options.index, options.run)


def run_role(role: str, index: int, url: str, world: "World | None" = None) -> int:
    """Run one life of a role, and return the exit code. With a `world`, the role is the trainer, and the other ranks of
    this world are started by something else."""
    try:
        return live(role, index, Run.open(url), world)
    except TBAError as error:
        if isinstance(error, DataError) and error.__cause__:  # usually an exception in the task's own code
            log.error("%s failed", role, exc_info=error.__cause__)
        log.error("%s: %s", type(error).__name__, error)
        if isinstance(error, ConfigError | DataError):
            return MISUSED
        return GAVE_UP if isinstance(error, DeadlinePassed) else FAILED


def live(role: str, index: int, run: Run, world: "World | None" = None) -> int:
    """Do the role's work while holding its lease. Return the exit code."""
    config = parse(run.config)
    limits = config.limits
    name = layout.role_name(role, index)
    number = index if role == "searcher" else None
    with HeldLease(run, name, every=limits.lease_every, orphan_after=limits.orphan_after, index=number) as lease:
        signal.signal(signal.SIGTERM, lambda *_: lease.stop("SIGTERM"))
        events = Events(run, name, lease.life)
        events.write("started", f"{name} has started: life {lease.life}, pid {os.getpid()}")
        for warning in memory_warnings(held_devices(), own=1):
            events.write("gpu-memory-taken", warning, severity="warning")
        try:
            if role in SWEPT_BY:
                sweep(run, events, SWEPT_BY[role](index))
            work(role, index, run, config, lease, events, world)
        except Stopped as stopped:
            events.write("stopped", str(stopped))
            return STOPPED
        except Superseded as superseded:
            log.error("%s", superseded)
            return SUPERSEDED
        except TBAError as error:
            events.write("failed", f"{type(error).__name__}: {error}", severity="error")
            raise
        except Exception as error:
            events.write("failed", f"{type(error).__name__}: {error}", severity="error")
            log.info("traceback of %s:", name, exc_info=True)
            log.error("%s: %s", type(error).__name__, error)  # the last line of a log is what people read first
            lease.close("failed")
            return FAILED
        events.write("finished", f"{name} has done its work")
        lease.close("finished")
        return FINISHED


def work(
    role: str, index: int, run: Run, config: Config, lease: HeldLease, events: Events, world: "World | None" = None
) -> None:
    """Set the number of threads, then import the machine learning libraries, then do the role's work."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # one bar per publish would fill the log
    lease.tell("loading libraries")
    use_threads(config, world.local_size if world else None)
    from flows.roles import wiring

    if role == "searcher":
        wiring.run_searcher(run, index, lease, events)
    elif role == "trainer":
        switch_soon()
        wiring.run_trainer(run, lease, events, world)
    else:
        wiring.run_evaluator(run, lease, events)


if __name__ == "__main__":
    sys.exit(main())
