"""Roles on other machines: each life of a role is a run of a deployment such as `searcher/gsm8k`.

The worker's machine starts the process and watches it (flows/roles.py); this side says when, and judges by leases.
What Prefect believes of a flow run only confirms an end: while its server cannot be reached, roles work on.
"""

import time
from typing import Any, cast
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.states import Cancelling

from flows.processes import FAILED, FINISHED, MISUSED, STOPPED, SUPERSEDED, NotNow, Role
from storage import layout
from storage.run import Run
from tba.config import Config
from tba.errors import Missing, RunFailed

FLOWS = {"searcher": "searcher", "trainer": "trainer", "evaluator": "evaluate"}
CODES = {
    "Completed": FINISHED,
    "Misused": MISUSED,
    "Superseded": SUPERSEDED,
    "Stopped": STOPPED,
    "Cancelled": STOPPED,
}
"""What the final state of a role's flow run, by name, says about the role."""

UNREACHABLE = (httpx.HTTPError, RuntimeError)  # RuntimeError: "Failed to reach API"


class DeploymentLauncher:
    end_grace = 40.0  # the worker notices, asks the role, and kills it after 30 s

    def __init__(self, run: Run, config: Config):
        self.run, self.task = run, config.task.name
        self.start_deadline = config.limits.data_deadline  # a machine may have to be found first

    def start(self, role: Role, attempt: int) -> "DeployedLife":
        """Asking twice for one attempt, as after a crash of this side, gives one flow run."""
        deployment = f"{FLOWS[role.kind]}/{self.task}"
        parameters: dict[str, Any] = {"run": self.run.url, "attempt": attempt}
        if role.kind == "searcher":
            parameters["index"] = role.index
        try:
            asked = run_deployment(
                deployment,
                parameters=parameters,
                timeout=0,
                idempotency_key=f"{self.run.url}@{self.run.created_at}/{role.kind}/{role.index}/{attempt}",
                flow_run_name=f"{self.run.name}-{role.name}-{attempt}",
            )
        except ObjectNotFound:
            raise RunFailed(
                f"there is no deployment {deployment!r}: `prefect --no-prompt deploy --all` registers it"
            ) from None
        except UNREACHABLE as error:
            raise NotNow(f"{deployment} could not be asked for: {error}") from error
        flow_run = cast(FlowRun, asked)  # outside of an event loop it is not a coroutine
        if flow_run.state and flow_run.state.is_final():  # of a supervisor before this one
            return self.start(role, attempt + 1)
        return DeployedLife(self.run, role, attempt, flow_run.id, flow_run.name)

    def ended(self, life: "DeployedLife") -> None:
        """Its machine has tidied up."""

    def close(self) -> None:
        """Nothing is held."""


class DeployedLife:
    """One flow run of a role's deployment."""

    every = 3.0  # seconds between two questions to the server

    def __init__(self, run: Run, role: Role, attempt: int, flow_run: UUID, name: str):
        self.run, self.role, self.attempt = run, role, attempt
        self.flow_run, self.name = flow_run, name
        self.state: State[Any] | None = None
        self.next_question = 0.0

    @property
    def where(self) -> str:
        return f"flow run {self.name} ({self.flow_run})"

    def poll(self) -> int | None:
        if time.monotonic() >= self.next_question and not self.is_final():
            self.next_question = time.monotonic() + self.every
            try:
                with get_client(sync_client=True) as client:
                    self.state = client.read_flow_run(self.flow_run).state
            except ObjectNotFound:
                return FAILED
            except UNREACHABLE:
                return None
        if self.state is None or not self.state.is_final():
            return None
        return CODES.get(self.state.name or "", FAILED)

    def is_final(self) -> bool:
        return self.state is not None and self.state.is_final()

    def terminate(self) -> None:
        """The worker passes it on as SIGTERM, and as SIGKILL after 30 s."""
        try:
            with get_client(sync_client=True) as client:
                client.set_flow_run_state(self.flow_run, Cancelling())
        except (*UNREACHABLE, PrefectHTTPStatusError):
            return  # its role hears of the stop from storage

    def kill(self) -> None:
        self.terminate()

    def let_go(self) -> None:
        """It needs nothing from this side."""

    def last_words(self) -> str:
        said = (self.state.message or "") if self.state else ""
        try:
            log = self.run.store.read(layout.log(self.role.name, self.attempt)).decode(errors="replace")
        except Missing:
            return said
        return "\n".join([said, *log.splitlines()[-20:]])
