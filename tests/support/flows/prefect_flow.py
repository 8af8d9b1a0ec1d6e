"""Runs of the flow `tba` on a Prefect server."""

import time
from pathlib import Path
from typing import Any

from flows.orchestration.local_server import FINAL, Stack
from storage import layout
from storage.objects.open_store import open_store
from storage.runs.run import Run
from tests.support.flows.roles import LIMITS
from tests.support.waiting import until

OVERRIDES = {**LIMITS, "search.searchers": 1}
ROLES = ("trainer", "evaluator", "searcher-000")


class Flow:
    """One run of a deployment."""

    def __init__(self, stack: Stack, root: Path | str, name: str, **parameters: Any):
        self.stack = stack
        self.url = layout.run_url(str(root), name)
        settings = {} if parameters.get("resume") else {"overrides": OVERRIDES}
        deployment = stack.api.call("GET", "/deployments/name/tba/quickstart")["id"]
        asked = {"parameters": {"run": name, "root": str(root), **settings, **parameters}}
        self.id = stack.api.call("POST", f"/deployments/{deployment}/create_flow_run", asked)["id"]

    def run(self) -> Run:
        until(lambda: self.state() in FINAL or open_store(self.url).exists(layout.RUN), "there is a run")
        return Run.open(self.url)

    def state(self) -> str:
        return self.stack.api.state_of(self.id)["type"]

    def runs(self) -> int:
        return self.stack.api.call("GET", f"/flow_runs/{self.id}")["run_count"]

    def ended(self, within: float = 90.0) -> dict[str, Any]:
        until(lambda: self.state() in FINAL, "the flow ends", within)
        return self.stack.api.state_of(self.id)

    def again(self) -> None:
        """Retry the flow like a person who presses Retry, after the worker has finished with the first run and its
        folder."""
        self.gone()
        self.go_on()

    def gone(self) -> None:
        name = self.stack.api.call("GET", f"/flow_runs/{self.id}")["name"]
        log = self.stack.logs / "worker-tba.log"
        until(lambda: f"Process for flow run '{name}' exited" in log.read_text(), "the process has ended")
        time.sleep(3.0)  # until then, the worker may still set the state of the flow run to crashed

    def go_on(self, child: str = "") -> None:
        of = self.found_children()[child]["id"] if child else self.id
        state = {"type": "SCHEDULED", "name": "AwaitingRetry"}
        self.stack.api.call("POST", f"/flow_runs/{of}/set_state", {"state": state, "force": True})

    def log(self) -> str:
        wanted = {"logs": {"flow_run_id": {"any_": [self.id]}}}
        return "\n".join(it["message"] for it in self.stack.api.call("POST", "/logs/filter", wanted))

    def cancel(self) -> None:
        self.stack.api.set_state(self.id, "CANCELLING")

    def children(self) -> dict[str, str]:
        return {name: it["state_name"] for name, it in self.found_children().items()}

    def found_children(self) -> dict[str, dict[str, Any]]:
        wanted = {"flow_runs": {"parent_flow_run_id": {"any_": [self.id]}}}
        return {it["name"]: it for it in self.stack.api.call("POST", "/flow_runs/filter", wanted)}
