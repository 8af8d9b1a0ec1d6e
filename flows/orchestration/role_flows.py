"""The flows `searcher`, `trainer` and `evaluate`: one life of one role, on the machine of the worker that took it.

Started by the flow `tba` under launcher `deployments`, which also says whether a role is started again. The final
state says how the life ended: Completed, Stopped, Superseded, or Failed with the role's last words.
"""

from functools import partial
from typing import Any

from prefect import flow
from prefect.logging import get_run_logger
from prefect.states import Completed, Failed, State

from flows.orchestration.artifacts import LEVELS, SECONDS_LEFT
from flows.orchestration.flow import goes
from flows.supervision.background_supervisor import Background, local_launcher
from flows.supervision.life import Event
from flows.supervision.one_life import watch_one
from flows.supervision.processes import FINISHED, GAVE_UP, MISUSED, STOPPED, SUPERSEDED, Kind, Role
from storage.runs.run import Run
from tba.config import parse
from tba.errors import ConfigError


@flow(name="searcher", persist_result=False)
def searcher(run: str, index: int = 0, life: int = 1) -> State[Any]:
    """Generates responses and appends them to the run's log until the run stops."""
    return live("searcher", run, index, life)


@flow(name="trainer", persist_result=False)
def trainer(run: str, life: int = 1) -> State[Any]:
    """Takes the run's gradient steps and publishes versions; continues the newest checkpoint if there is one."""
    return live("trainer", run, 0, life)


@flow(name="evaluate", persist_result=False)
def evaluate(run: str, life: int = 1) -> State[Any]:
    """Scores versions as they are published, the first and the last always."""
    return live("evaluator", run, 0, life)


def live(kind: Kind, url: str, index: int, life: int) -> State[Any]:
    """A life is lived once: where Prefect or a cluster has another go at its flow run, the supervisor has started
    another life of the role, or will, or the first go lives."""
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
    """The names are what flows/orchestration/deployments.py reads."""
    if code == FINISHED:
        return Completed(message=f"{role.name} has finished")
    if code == STOPPED:
        return Completed(name="Stopped", message=f"{role.name} was asked to stop")
    if code == SUPERSEDED:
        return Completed(name="Superseded", message=f"if {role.name} lives, it is in another life")
    name = {MISUSED: "Misused", GAVE_UP: "Gave up"}.get(code, "Failed")
    return Failed(name=name, message=f"{role.name} ended with code {code}; its last words:\n{last_words}")
