"""A client for the REST API of a Prefect server on this machine."""

import base64
import json
import time
import urllib.error
import urllib.request
from contextlib import suppress
from typing import Any

BUSY_DEADLINE = 30.0  # seconds for which requests to a busy server are repeated


class PrefectApi:
    """The server that listens at `port`. `password` is the value of PREFECT_API_AUTH_STRING: a name, a colon, and a
    secret."""

    def __init__(self, port: int, password: str):
        self.port, self.password = port, password

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.address}/api"

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Send one request and return the answer. A server whose database is locked answers 503 and has done nothing,
        so the request is sent again for up to BUSY_DEADLINE seconds."""
        data = None if body is None else json.dumps(body).encode()
        key = base64.b64encode(self.password.encode()).decode()
        headers = {"Content-Type": "application/json", "Authorization": f"Basic {key}"}
        request = urllib.request.Request(self.url + path, data=data, headers=headers, method=method)
        deadline = time.monotonic() + BUSY_DEADLINE
        while True:
            try:
                with urllib.request.urlopen(request, timeout=30) as response:
                    return json.loads(response.read() or b"null")
            except urllib.error.HTTPError as error:
                if error.code != 503 or time.monotonic() > deadline:
                    raise
                time.sleep(0.5)

    def is_healthy(self) -> bool:
        with suppress(OSError):
            return self.call("GET", "/health") is True
        return False

    def make_pool(self, pool: str) -> None:
        """Make a work pool for processes, unless it exists."""
        try:
            self.call("POST", "/work_pools/", {"name": pool, "type": "process"})
        except urllib.error.HTTPError as error:
            if error.code != 409:  # it exists
                raise

    def has_worker(self, pool: str) -> bool:
        workers = self.call("POST", f"/work_pools/{pool}/workers/filter", {})
        return any(worker["status"] == "ONLINE" for worker in workers)

    def flow_runs(self, *states: str) -> list[dict[str, Any]]:
        """Return the flow runs in any of these states, or in any state if none is named, newest first. The server
        limits their number."""
        wanted = {"state": {"type": {"any_": list(states)}}} if states else {}
        return self.call("POST", "/flow_runs/filter", {"flow_runs": wanted, "sort": "START_TIME_DESC"})

    def flow_run_named(self, name: str) -> str:
        """Return the id of the one flow run of this name."""
        (flow_run,) = self.call("POST", "/flow_runs/filter", {"flow_runs": {"name": {"any_": [name]}}})
        return flow_run["id"]

    def set_state(self, flow_run: str, kind: str) -> None:
        state = {"type": kind, "message": "the stack is stopping"}
        self.call("POST", f"/flow_runs/{flow_run}/set_state", {"state": state})

    def state_of(self, flow_run: str) -> dict[str, Any]:
        """Return the state of a flow run: its `type`, `name` and `message`."""
        return self.call("GET", f"/flow_runs/{flow_run}")["state"]
