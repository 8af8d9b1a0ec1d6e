"""The flow `tba`: from a task's name to a finished run.

    prefect deployment run tba/gsm8k --param root=s3://bucket/x --param overrides='{"training.steps": 10}'

It validates, creates or resumes the run, launches the roles, watches them and reports. It decides nothing about
learning, and holds nothing: when it dies the roles go on, and `resume` adopts them. Cancelling it stops every role in
order and leaves a run that can be resumed.
"""

import time
from functools import partial
from typing import Annotated, Any, Literal

from prefect import flow
from prefect.context import FlowRunContext
from prefect.logging import get_run_logger
from prefect.states import Cancelled, State
from pydantic import Field

from flows.orchestration.artifacts import SECONDS_LEFT, Reports
from flows.orchestration.deployments import DeploymentLauncher
from flows.planning import create, resolve
from flows.supervision.background_supervisor import Background, local_launcher
from flows.supervision.life import FAILED_WHY, Launcher
from flows.supervision.supervisor import supervise
from storage import layout
from storage.objects.open_store import open_store
from storage.runs.control import change_state, read_state
from storage.runs.leases import SUPERVISOR, readable_lease
from storage.runs.run import Run, default_root
from tba.config import Config, parse_known
from tba.errors import ConfigError, RunFailed, Stopped, Superseded

Count = Annotated[int, Field(ge=0)]


@flow(name="tba", persist_result=False)
def tba(
    task: str = "quickstart",
    run: str | None = None,
    root: str | None = None,
    steps: Annotated[int, Field(ge=1)] | None = None,
    searchers: Count | None = None,
    seed: Count | None = None,
    launcher: Literal["local", "deployments"] = "local",
    resume: bool = False,
    overrides: dict[str, Any] | None = None,
) -> str | State[Any]:
    """Train on a task, from its settings to a finished run; returns the run's URL.

    Args:
        task: What is asked and how it is rewarded, with the settings it brings: quickstart, gsm8k, math, tldr, redteam,
            verifiers, an entry point of an installed package, or the path of a class, such as package.module:Class.
        run: Name of the run; derived from the task if not given. With `resume`, its name or URL.
        root: Folder or s3:// URL for runs, as the machine that runs this flow sees it.
        steps: Gradient steps to take.
        searchers: How many searchers generate side by side; with none a run learns from imports alone.
        seed: Of everything random.
        launcher: `local` starts every role beside this flow, `deployments` on the workers of gpu-search and gpu-train.
        resume: Go on with a run that was interrupted or stopped.
        overrides: Any other setting by its dotted name, such as {"training.learning_rate": 1e-5}.
    """
    name, root = run_name(task, run), resolve.lasting(root or default_root())
    if resume or is_another_go(name, root):
        if resume and (overrides or steps is not None or seed is not None):
            raise ConfigError("a run that is resumed keeps its settings: give neither steps nor seed nor overrides")
        while True:
            try:
                # another go leaves the number of searchers alone, which `tba scale` may have changed since
                subject, config = resume_run(task, name, root, searchers if goes() == 1 else None)
                break
            except create.LookedAfter as taken:
                if goes() == 1:
                    raise
                if ended := stand_by(taken.run):
                    return ended
    else:
        here = launcher == "local"
        config = resolve.resolve(task, overrides, runs_here=here, steps=steps, searchers=searchers, seed=seed)
        subject = create.start(config, root, name, created_by=this_flow_run())
    try:
        look_after(subject, config, launcher)
    except Stopped as stopped:
        return Cancelled(message=f"{stopped}; it can be resumed: {subject.url}")
    except Superseded as superseded:
        return Cancelled(name="Superseded", message=f"{superseded}; its roles go on under that")
    return subject.url


def look_after(run: Run, config: Config, launcher: str) -> None:
    """Launch the roles, watch them to the end of the run, and report."""
    launch: Launcher = DeploymentLauncher(run, config) if launcher == "deployments" else local_launcher(run, config)
    with Reports(run, config) as reports:
        work = partial(supervise, run, launch, config, on_look=reports.look)
        with Background(work, within=SECONDS_LEFT, last=reports.log) as background:
            try:
                for event in background.news():
                    reports.hear(event)
            except RunFailed:
                reports.finish()
                raise
        reports.finish()


def stand_by(run: Run) -> str | State[Any] | None:
    """Wait while another supervisor lives: where Prefect's server or a cluster took one for dead, its flow run is gone
    through twice at once. What the flow returns if the run came to an end with it; None if it has to be looked
    after."""
    get_run_logger().info(f"{run.url} is looked after by an earlier go, which lives: this one stands by")
    config = parse_known(run.config)
    while create.living_supervisor(run, config):  # which takes as long as a lease is good for
        time.sleep(config.limits.lease_every)
    last, wanted = readable_lease(run, SUPERVISOR), read_state(run)
    if last and last.status == "finished":
        return run.url
    if wanted.desired == "run":
        return None
    if wanted.why.startswith(FAILED_WHY):
        raise RunFailed(f"run {run.name} has {wanted.why}")
    return Cancelled(message=f"run {run.name} was stopped: {wanted.why}; it can be resumed: {run.url}")


def resume_run(task: str, name: str | None, root: str, searchers: int | None) -> tuple[Run, Config]:
    if name is None:
        raise ConfigError("run: the name or URL of the run to resume is needed")
    subject, config = create.resume(url_of(name, root))
    if config.task.name != task:
        raise ConfigError(f"task: run {subject.name!r} is of task {config.task.name!r}, got {task!r}")
    if searchers is not None and config.sync.lag is not None and searchers != config.search.searchers:
        raise ConfigError(
            f"searchers: the trainer waits for each of {config.search.searchers} where sync.lag is set, got {searchers}"
        )
    if searchers is not None:
        change_state(subject, searchers=searchers)
    return subject, config


def run_name(task: str, run: str | None) -> str | None:
    """As given, else after the flow run, so that another go of that finds the same run."""
    context = FlowRunContext.get()
    if run or context is None or context.flow_run is None:
        return run
    return f"{resolve.short_name(task)}-{context.flow_run.name}"


def url_of(name: str, root: str) -> str:
    return name if "/" in name else layout.run_url(root, name)


def this_flow_run() -> str:
    context = FlowRunContext.get()
    return f"flow run {context.flow_run.id}" if context and context.flow_run else "flow tba"


def goes() -> int:
    """How often Prefect has begun with this flow run."""
    context = FlowRunContext.get()
    return context.flow_run.run_count if context and context.flow_run else 1


def is_another_go(name: str | None, root: str) -> bool:
    """Whether Prefect runs this flow run once more, after a crash or at somebody's request, and the run is there. One
    of that name that somebody else has made is not."""
    if name is None or goes() < 2:
        return False
    url = url_of(name, root)
    return open_store(url).exists(layout.RUN) and Run.open(url).created_by == this_flow_run()
