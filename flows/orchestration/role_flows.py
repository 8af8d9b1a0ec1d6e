"""The flows `searcher`, `trainer` and `evaluate`: each is one life of one role, on the machine of a worker.

The flow `tba` starts them with launcher `deployments`, and decides whether a role is started again. People start the
flow `trainer-node`, once for each machine of a trainer on several machines. The final state of the flow run says how
the life ended: Completed, Stopped, Superseded, Misused, Gave up, or Failed. The last three come with the end of the
role's log.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from prefect import flow
from prefect.logging import get_run_logger
from prefect.states import Completed, Failed, State
from pydantic import Field

from flows.orchestration.artifacts import LEVELS, SECONDS_LEFT
from flows.orchestration.flow import Count, goes
from flows.supervision.background_supervisor import Background, local_launcher, node_launcher
from flows.supervision.interfaces import Event, Launcher
from flows.supervision.one_life import watch_one
from flows.supervision.processes import FINISHED, GAVE_UP, MISUSED, STOPPED, SUPERSEDED, Role, last_life
from storage.runs.run import Run
from tba.config import Config, parse
from tba.errors import ConfigError

Positive = Annotated[int, Field(ge=1)]


@flow(name="searcher", persist_result=False)
def searcher(run: str, index: int = 0, life: int = 1) -> State[Any]:
    """Generate responses and append them to the run's log until the run stops."""
    return live(Run.open(run), Role("searcher", index), life, partial(local_launcher, trains=False))


@flow(name="trainer", persist_result=False)
def trainer(run: str, life: int = 1) -> State[Any]:
    """Take gradient steps and publish versions. Continue from the newest intact checkpoint, if there is one."""
    return live(Run.open(run), Role("trainer"), life, partial(local_launcher, generates=False))


@flow(name="evaluate", persist_result=False)
def evaluate(run: str, life: int = 1) -> State[Any]:
    """Score published versions: the first, the last, and about every `evaluation.every`-th between them. Versions that
    the evaluator is too slow for are not scored."""
    return live(Run.open(run), Role("evaluator"), life, partial(local_launcher, trains=False))


@flow(name="trainer-node", persist_result=False)
def trainer_node(
    run: str, nodes: Positive, node: Count = 0, ranks: Positive | None = None, address: str = "", port: Count = 0
) -> State[Any]:
    """Run the ranks of a trainer that are on this machine, one of several. Rank 0 is on machine 0 and leads the others.

    Args:
        run: URL of the run, which has a supervisor that does not start the trainer (`external_trainer`).
        nodes: Number of machines. Each needs a flow run of its own.
        node: Number of this machine, from 0.
        ranks: Number of ranks on each machine, the same on all. Without it, the number of GPUs of this machine, or 1.
        address: Address of machine 0. Without it, machine 0 takes the address of its host's name, and the others read
            it from the run's storage.
        port: Port of rank 0 at this address. Without it, any port.
    """
    subject, role = Run.open(run), Role("trainer-node", node)
    place = {"nodes": nodes, "node": node, "address": address, "port": port}
    return live(subject, role, last_life(subject, role) + 1, partial(node_launcher, ranks=ranks, place=place))


def live(run: Run, role: Role, life: int, make_launcher: Callable[[Run, Config], Launcher]) -> State[Any]:
    """Start one life of a role, watch it, and return the final state of its flow run. If Prefect or a cluster starts
    the flow run a second time, return Superseded without a start: the first life is still alive, or whoever has started
    it starts another life."""
    logger = get_run_logger()
    if goes() > 1:
        return final_state(role, SUPERSEDED, "")
    config = parse(run.config)
    try:
        launcher = make_launcher(run, config)
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
