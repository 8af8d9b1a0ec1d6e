"""Roles on other machines: each life of a role is a run of a deployment such as `searcher/gsm8k`.

The machine of the worker starts the role's process and watches it (flows/orchestration/role_flows.py). The supervisor
decides when a role is started, and judges by leases whether it hangs. From Prefect the supervisor learns only whether
a flow run has started, and how it has ended. While Prefect's server cannot be reached, roles keep working.
"""

import contextvars
import logging
import threading
from typing import Any, cast
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun, State
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_REQUEST_TIMEOUT, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelling

from flows.supervision.processes import FAILED, FINISHED, GAVE_UP, MISUSED, STOPPED, SUPERSEDED, NotNow, Role
from storage import layout
from storage.runs.run import Run
from tba.config import Config
from tba.errors import Missing, RunFailed

log = logging.getLogger(__name__)

FLOWS = {"searcher": "searcher", "trainer": "trainer", "evaluator": "evaluate"}
CODES = {
    "Completed": FINISHED,
    "Misused": MISUSED,
    "Gave up": GAVE_UP,
    "Superseded": SUPERSEDED,
    "Stopped": STOPPED,
    "Cancelled": STOPPED,
}
"""The exit code of a role for each name of the final state of its flow run. Any other name means FAILED."""

UNREACHABLE = (httpx.HTTPError, RuntimeError)  # RuntimeError: "Failed to reach API"
HURRY: Any = {PREFECT_API_REQUEST_TIMEOUT: 10.0, PREFECT_CLIENT_MAX_RETRIES: 0}  # the caller tries again itself


class DeploymentLauncher:
    """Starts each life of a role as a flow run of the role's deployment, which has the name of the task or preset that
    the flow was asked for."""

    end_grace = 40.0  # the worker notices the request, asks the role to stop, and kills it after 30 s
    last_word_after = 15.0  # the process that watches the role may be dead, or may not reach the server

    def __init__(self, run: Run, config: Config, task: str):
        self.run, self.task = run, task
        self.start_deadline = config.limits.data_deadline  # the life may have to wait for a machine
        self.inquiry = Inquiry()

    def start(self, role: Role, number: int) -> "DeployedLife":
        """Create a flow run for a life of the role, and return the life. If a flow run for this life exists already, as
        after a crash of the supervisor, return the life with this flow run. If that flow run has ended, use the next
        number."""
        deployment = f"{FLOWS[role.kind]}/{self.task}"
        flow_run = self.ask(deployment, role, number)
        if flow_run.state and flow_run.state.is_final():  # a flow run of an earlier supervisor
            return self.start(role, number + 1)
        self.inquiry.follow(flow_run.id)
        return DeployedLife(self.run, role, number, flow_run.id, flow_run.name, self.inquiry)

    def ask(self, deployment: str, role: Role, number: int) -> FlowRun:
        parameters: dict[str, Any] = {"run": self.run.url, "life": number}
        if role.kind == "searcher":
            parameters["index"] = role.index
        try:
            with temporary_settings(HURRY):
                flow_run = run_deployment(
                    deployment,
                    parameters=parameters,
                    timeout=0,
                    idempotency_key=f"{self.run.url}@{self.run.created_at}/{role.kind}/{role.index}/{number}",
                    flow_run_name=f"{self.run.name}-{role.name}-{number}",
                )
        except ObjectNotFound:
            raise RunFailed(
                f"there is no deployment {deployment!r}: register it with `prefect --no-prompt deploy --all`"
            ) from None
        except UNREACHABLE as error:
            if is_refusal(error):
                raise RunFailed(f"Prefect's server refused to run {deployment!r}: {error}") from error
            raise NotNow(f"Prefect's server could not be asked to run {deployment}: {error}") from error
        return cast(FlowRun, flow_run)  # not a coroutine, because there is no event loop here

    def ended(self, life: "DeployedLife") -> None:
        """Forget the life. The machine on which it ran has cleaned up."""
        self.inquiry.forget(life.flow_run)

    def close(self) -> None:
        self.inquiry.close()


def is_refusal(error: BaseException) -> bool:
    """Return True if the server understood the request and refused it, so that asking again would not help."""
    if not isinstance(error, httpx.HTTPStatusError):
        return False
    return 400 <= error.response.status_code < 500 and error.response.status_code not in (408, 429)


class DeployedLife:
    """One flow run of a role's deployment."""

    def __init__(self, run: Run, role: Role, number: int, flow_run: UUID, name: str, inquiry: "Inquiry"):
        self.run, self.role, self.number = run, role, number
        self.flow_run, self.name, self.inquiry = flow_run, name, inquiry

    @property
    def where(self) -> str:
        return f"flow run {self.name} ({self.flow_run})"

    @property
    def waits_for(self) -> str:
        state = self.state
        if state is None:
            return f"Prefect's server has not reported the state of {self.where}"
        if state.is_scheduled() or state.is_pending():
            return f"no worker has started {self.where}, which is {state.name}; is there a worker for its work pool?"
        return ""

    @property
    def state(self) -> State[Any] | None:
        return self.inquiry.states.get(self.flow_run)

    def poll(self) -> int | None:
        if self.flow_run in self.inquiry.gone:
            return FAILED
        if self.state is None or not self.state.is_final():
            return None
        return CODES.get(self.state.name or "", FAILED)

    def terminate(self) -> None:
        """Ask Prefect to cancel the flow run. The worker then sends SIGTERM, and SIGKILL after 30 s. If the server
        cannot be reached, the role still reads in storage that it is to stop."""
        self.inquiry.cancel(self.flow_run)

    def kill(self) -> None:
        self.terminate()

    def let_go(self) -> None:
        self.inquiry.forget(self.flow_run)

    def last_words(self) -> str:
        message = (self.state.message or "") if self.state else ""
        try:
            log = self.run.store.read(layout.log(self.role.name, self.number)).decode(errors="replace")
        except Missing:
            return message
        return "\n".join([message, *log.splitlines()[-20:]])


class Inquiry:
    """Asks Prefect's server for the states of flow runs, and cancels flow runs, in a thread of its own. A slow server
    must not keep the supervisor from reading and renewing leases."""

    every = 3.0  # seconds between two requests

    def __init__(self) -> None:
        self.states: dict[UUID, State[Any]] = {}
        self.gone: set[UUID] = set()
        self._followed: set[UUID] = set()
        self._to_cancel: set[UUID] = set()
        self._wake, self._closing = threading.Event(), threading.Event()
        context = contextvars.copy_context()  # it tells Prefect which server to use
        self._thread = threading.Thread(target=context.run, args=(self._ask,), name="inquiry", daemon=True)

    def follow(self, flow_run: UUID) -> None:
        self._followed.add(flow_run)
        if not self._thread.is_alive() and not self._closing.is_set():
            self._thread.start()

    def forget(self, flow_run: UUID) -> None:
        self._followed.discard(flow_run)

    def cancel(self, flow_run: UUID) -> None:
        self._to_cancel.add(flow_run)
        self._wake.set()

    def close(self) -> None:
        self._closing.set()
        self._wake.set()

    def _ask(self) -> None:
        while not self._closing.is_set():
            try:
                with temporary_settings(HURRY), get_client(sync_client=True) as client:
                    self._cancel(client)
                    self._look(client)
            except Exception as error:  # many kinds; until the server answers again, leases show how the roles are
                log.info("Prefect's server could not be asked: %s: %s", type(error).__name__, error)
            self._wake.wait(self.every)
            self._wake.clear()

    def _cancel(self, client: Any) -> None:
        for flow_run in list(self._to_cancel):
            try:
                client.set_flow_run_state(flow_run, Cancelling())
            except UNREACHABLE as error:
                if not is_refusal(error):
                    raise
            except ObjectNotFound:
                self.gone.add(flow_run)
            self._to_cancel.discard(flow_run)

    def _look(self, client: Any) -> None:
        followed = list(self._followed)
        if not followed:
            return
        flow_runs = client.read_flow_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=followed)))
        self.states.update({flow_run.id: flow_run.state for flow_run in flow_runs if flow_run.state})
        self.gone.update(set(followed) - {flow_run.id for flow_run in flow_runs})
