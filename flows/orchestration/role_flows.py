"""The flows `searcher`, `trainer` and `evaluate`: each is one life of one role, on the machine of a worker.

The flow `tba` starts them with launcher `deployments`, and decides whether a role is started again. The final state
of the flow run says how the life ended: Completed, Stopped, Superseded, Misused, Gave up, or Failed. The last three
come with the end of the role's log.
"""

from functools import partial
from typing import Any

from prefect import flow
from prefect.logging import get_run_logger
from prefect.states import Completed, Failed, State

from flows.orchestration.artifacts import LEVELS, SECONDS_LEFT
from flows.orchestration.flow import goes
from flows.supervision.background_supervisor import Background, local_launcher
from flows.supervision.interfaces import Event
from flows.supervision.one_life import watch_one
from flows.supervision.processes import FINISHED, GAVE_UP, MISUSED, STOPPED, SUPERSEDED, Kind, Role
from storage.runs.run import Run
from tba.config import parse
from tba.errors import ConfigError


@flow(name="searcher", persist_result=False)
def searcher(run: str, index: int = 0, life: int = 1) -> State[Any]:
    """Generate responses and append them to the run's log until the run stops."""
    return live("searcher", run, index, life)


@flow(name="trainer", persist_result=False)
def trainer(run: str, life: int = 1) -> State[Any]:
    """Take gradient steps and publish versions. Continue from the newest intact checkpoint, if there is one."""
    return live("trainer", run, 0, life)


@flow(name="evaluate", persist_result=False)
def evaluate(run: str, life: int = 1) -> State[Any]:
    """Score published versions: the first, the last, and about every `evaluation.every`-th between them. Versions that
    the evaluator is too slow for are not scored."""
    return live("evaluator", run, 0, life)


def live(kind: Kind, url: str, index: int, life: int) -> State[Any]:
    """Start one life of a role, watch it, and return the final state of its flow run. If Prefect or a cluster starts
    the flow run a second time, return Superseded without a start: the first life is still alive, or the supervisor
    starts another life."""
    run, role, logger = Run.open(url), Role(kind, index), get_run_logger()
    if goes() > 1:
        return final_state(role, SUPERSEDED, "")
    config = parse(run.config)
    try:
        launcher = local_launcher(run, config, trains=kind == "trainer", generates=kind != "trainer")
    except ConfigError as error:
        return final_state(role, MISUSED, f"error: {error}")
    work = partial(watch_one, run, launcher, config.limits, role, life)

    def log(event: Event | None) -> None:
        if event:
            logger.log(LEVELS[event.severity], event.message)

    with Background(work, within=SECONDS_LEFT, last=log) as background:
        for event in background.news():
            log(event)
    return final_state(role, *background.result)


def final_state(role: Role, code: int, last_words: str) -> State[Any]:
    """Return the final state of a flow run. flows/orchestration/deployments.py reads the exit code from its name."""
    if code == FINISHED:
        return Completed(message=f"{role.name} has finished")
    if code == STOPPED:
        return Completed(name="Stopped", message=f"{role.name} was asked to stop")
    if code == SUPERSEDED:
        return Completed(name="Superseded", message=f"another life of {role.name} has taken over")
    name = {MISUSED: "Misused", GAVE_UP: "Gave up"}.get(code, "Failed")
    return Failed(name=name, message=f"{role.name} ended with exit code {code}; the end of its log:\n{last_words}")
