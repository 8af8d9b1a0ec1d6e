"""The flow `tba`: from a task's name to a finished run.

    prefect deployment run tba/gsm8k --param root=s3://bucket/x --param overrides='{"training.steps": 10}'

The flow checks the settings, creates or resumes the run, starts the roles, watches them and reports. It decides nothing
about training and keeps no state: if it dies, the roles continue, and `resume` adopts them. Cancelling the flow run
stops all roles in order. The run can be resumed afterwards.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

from prefect import flow
from prefect.context import FlowRunContext
from prefect.logging import get_run_logger
from prefect.states import Cancelled, State
from pydantic import Field

from flows.commands.fork import kept_by_forks
from flows.orchestration.artifacts import SECONDS_LEFT, Reports
from flows.orchestration.deployments import DeploymentLauncher
from flows.planning import create, fit_to_gpus, resolve
from flows.supervision.background_supervisor import Background, local_launcher
from flows.supervision.interfaces import FAILED_WHY, Launcher
from flows.supervision.supervisor import supervise
from storage import layout
from storage.objects.open_store import open_store
from storage.runs.control import change_state, read_state
from storage.runs.leases import SUPERVISOR, readable_lease
from storage.runs.run import Run, default_root
from tba.config import Config, parse_known
from tba.errors import ConfigError, RunFailed, Stopped, Superseded
from tba.presets import task_of

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
    gpus: str | None = None,
    external_trainer: bool = False,
) -> str | State[Any]:
    """Train on a task until the run has finished, and return the run's URL.

    Args:
        task: The task to train on, with its preset of settings: quickstart, gsm8k, math, tldr, redteam,
            reasoning-gym, instructions, verifiers, a further preset of a task (redteam-laptop), an entry point of an
            installed package, or the path of a class, such as package.module:Class.
        run: Name of the run; made of the task if not given. With `resume`, the name or URL of the run to resume.
        root: Folder or s3:// URL for runs, as seen from the machine that runs this flow.
        steps: Number of gradient steps.
        searchers: Number of searchers that generate in parallel; with 0 the run trains on imported responses only.
        seed: Seed of everything random.
        launcher: `local` starts all roles on this flow's machine, `deployments` on workers of gpu-search and gpu-train.
        resume: Continue a run that was interrupted or stopped.
        overrides: Any other settings by their dotted names, such as {"training.learning_rate": 1e-5}.
        gpus: GPUs on which the run has to fit, such as 1x24 or 8x80 (number and GiB of each), or `here`: settings that
            are not given are changed accordingly. With `resume`, a run that does not fit is refused.
        external_trainer: Start no trainer: something else does, such as torchrun or flow runs of `trainer-node`.
    """
    name, root = run_name(task, run), resolve.lasting(root or default_root())
    if resume or is_another_go(name, root):
        changes = {"steps": steps, "seed": seed, "overrides": overrides or None}
        if resume and (given := [f"{name}={value!r}" for name, value in changes.items() if value is not None]):
            kept = "the run keeps its settings, so steps, seed and overrides must not be given"
            raise ConfigError(f"resume: {kept}, got {', '.join(given)}")
        fits = partial(refuse_too_large, gpus, launcher) if resume and gpus else None
        while True:
            try:
                # A retry keeps the number of searchers: `tba scale` may have changed it.
                subject, config = resume_run(task, name, root, searchers if goes() == 1 else None, fits=fits)
                break
            except create.AlreadySupervised as error:
                if goes() == 1:
                    raise
                if result := stand_by(error.run):
                    return result
    else:
        flat = {"steps": steps, "searchers": searchers, "seed": seed}
        config = settings_of(task, overrides, flat, launcher, gpus, trains=not external_trainer)
        subject = create.start(config, root, name, created_by=this_flow_run(), task=task)
    try:
        look_after(subject, config, launcher, task, external_trainer=external_trainer)
    except Stopped as stopped:
        return Cancelled(message=f"{stopped}; it can be resumed: {subject.url}")
    except Superseded as superseded:
        return Cancelled(name="Superseded", message=f"{superseded}; the roles continue under the new supervisor")
    return subject.url


def settings_of(
    task: str,
    overrides: dict[str, Any] | None,
    flat: dict[str, int | None],
    launcher: str,
    gpus: str | None,
    *,
    trains: bool,
) -> Config:
    """Return the settings of a new run. Raise ConfigError if it cannot work, or does not fit on its GPUs."""
    here = launcher == "local"
    config = resolve.resolve(task, overrides, runs_here=here, uses_gpus_here=here, trains_here=trains, **flat)
    if not gpus:
        return config
    return config.replace(fit_to_gpus.fit(config, gpus, resolve.changed_settings(overrides, flat), runs_here=here)[1])


def look_after(run: Run, config: Config, launcher: str, task: str, *, external_trainer: bool = False) -> None:
    """Start the roles, watch them until the run ends, and report to Prefect."""
    if launcher == "deployments":
        launch: Launcher = DeploymentLauncher(run, config, task)
    else:
        launch = local_launcher(run, config, trains=not external_trainer)
    with Reports(run, config) as reports:
        work = partial(supervise, run, launch, config, on_look=reports.look, external_trainer=external_trainer)
        with Background(work, within=SECONDS_LEFT, last=reports.log) as background:
            try:
                for event in background.news():
                    reports.hear(event)
            except RunFailed:
                reports.finish()
                raise
        reports.finish()


def stand_by(run: Run) -> str | State[Any] | None:
    """Wait while another supervisor is alive. This happens when Prefect's server or a cluster wrongly took a supervisor
    for dead and started its flow run a second time. If the run has ended during the wait, return the result of the
    flow, or raise RunFailed if the run has failed. Return None if the run now needs a supervisor."""
    get_run_logger().info(f"{run.url} still has a supervisor from an earlier try, which is alive: this one stands by")
    config = parse_known(run.config)
    while create.living_supervisor(run, config):  # each call waits for up to three renewal periods of the lease
        time.sleep(config.limits.lease_every)
    last, wanted = readable_lease(run, SUPERVISOR), read_state(run)
    if last and last.status == "finished":
        return run.url
    if wanted.desired == "run":
        return None
    if wanted.why.startswith(FAILED_WHY):
        raise RunFailed(f"run {run.name} has {wanted.why}")
    return Cancelled(message=f"run {run.name} was stopped: {wanted.why}; it can be resumed: {run.url}")


def refuse_too_large(gpus: str, launcher: str, config: Config) -> None:
    fit_to_gpus.refuse_too_large(config, gpus, kept_by_forks(config), runs_here=launcher == "local")


def resume_run(
    task: str, name: str | None, root: str, searchers: int | None, *, fits: Callable[[Config], None] | None = None
) -> tuple[Run, Config]:
    """Resume a run, with this number of searchers if it is given. `fits` raises ConfigError if the run must not be
    resumed with its settings and its searchers."""
    if name is None:
        raise ConfigError("run: must be the name or URL of the run to resume, got nothing")
    if fits:
        fits(fit_to_gpus.to_resume(Run.open(url_of(name, root)), searchers))
    subject, config = create.resume(url_of(name, root))
    if config.task.name != task_of(task):
        raise ConfigError(f"task: run {subject.name!r} is of task {config.task.name!r}, got {task!r}")
    if searchers is not None and config.sync.lag is not None and searchers != config.search.searchers:
        raise ConfigError(
            f"searchers: must stay {config.search.searchers}, because sync.lag is set and the trainer waits for each "
            f"searcher, got {searchers}"
        )
    if searchers is not None:
        change_state(subject, searchers=searchers)
    return subject, config


def run_name(task: str, run: str | None) -> str | None:
    """Return the given name of the run, or else a name made of the flow run's name, so that a retry of the flow run
    finds the same run."""
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
    """Return how often Prefect has started this flow run, this time included."""
    context = FlowRunContext.get()
    return context.flow_run.run_count if context and context.flow_run else 1


def is_another_go(name: str | None, root: str) -> bool:
    """Return True if Prefect has started this flow run before and this flow run has created the TBA run `name`. A TBA
    run of this name that something else created does not count."""
    if name is None or goes() < 2:
        return False
    url = url_of(name, root)
    return open_store(url).exists(layout.RUN) and Run.open(url).created_by == this_flow_run()
