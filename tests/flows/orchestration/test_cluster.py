"""A small cluster: Prefect's server on Postgres, and a worker for each pool. The tests kill these processes."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import storage
from benchmarks.harness.tiny_models import tiny_folder
from flows.cli import main
from flows.orchestration.local_server import FINAL, POOLS, Stack
from flows.supervision.interfaces import CLOSED
from storage.runs.control import read_state
from storage.runs.events import read_events
from storage.runs.leases import read_lease, read_leases
from storage.runs.run import Run
from tests.support.flows.prefect_flow import ROLES, Flow
from tests.support.flows.roles import HELD_ROLE, LIMITS, TINY, at_work, behave, end_roles, finish, is_running
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]
STEPS = 40
PATIENCE = 180.0
BLOCK = """
import sys
from prefect.blocks.notifications import CustomWebhookNotificationBlock
text = {"text": "{{subject}} {{body}}"}
CustomWebhookNotificationBlock(name="team", url=sys.argv[1], json_data=text).save("team")
"""
BEAT = """
import sys
from prefect.events import emit_event
flow = {"prefect.resource.id": "prefect.flow.x", "prefect.resource.role": "flow", "prefect.resource.name": "tba"}
emit_event("prefect.flow-run.heartbeat", {"prefect.resource.id": f"prefect.flow-run.{sys.argv[1]}"}, related=[flow])
"""


class Cluster(Stack):
    """A stack whose processes a test kills and starts again. A real cluster would start them again by itself."""

    def kill(self, name: str) -> None:
        """Kill a process and everything that it started, except roles, which have their own sessions."""
        process = self.processes.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def python(self, *arguments: str) -> str:
        return subprocess.run(
            [sys.executable, *arguments],
            env=self.environment,
            check=True,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        ).stdout


@pytest.fixture(scope="module")
def cluster(postgres: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    home = tmp_path_factory.mktemp("cluster")
    variables = {
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": postgres,
        "TBA_ROLE_COMMAND": f"{sys.executable} {HELD_ROLE}",
        "TBA_HOME": str(home),
        "TBA_CACHE": str(home / "cache"),
        "HELD_AT": str(home / "held-at"),
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    with Cluster(home, pools=POOLS, ui=False, variables=variables) as cluster:
        yield cluster


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for folder in tmp_path.glob("runs/*"):
        end_roles(Run.open(str(folder)))


def test_a_run_outlives_a_worker_a_role_and_the_server_and_is_scaled_meanwhile(cluster: Cluster, root: Path):
    hold(cluster, at=4)
    overrides = {"model.path": str(tiny_folder(root / "policy")), **TINY, "search.searchers": 1}
    flow = Flow(cluster, root, "r", launcher="deployments", steps=STEPS, overrides=overrides)
    run = flow.run()
    until(lambda: step_of(run, life=1) >= 4 and searching(run), "the trainer learns", PATIENCE)
    first = {role: until(lambda role=role: read_lease(run, role)) for role in ROLES}

    cluster.kill("worker-gpu-search")
    cluster.kill("server")
    os.kill(first["trainer"].pid, signal.SIGKILL)
    assert main(["scale", run.url, "--searchers", "4"]) == 0
    cluster.start_server()
    cluster.start_workers("gpu-search")
    until(lambda: len(searching(run)) == 4, "four search", PATIENCE)
    until(lambda: step_of(run, life=2) >= 2, "the trainer has another life", PATIENCE)
    assert is_running(first["searcher-000"].pid), "no role ends with what watched it"

    assert main(["scale", run.url, "--searchers", "2"]) == 0
    until(lambda: len(searching(run)) == 2, "two are enough", PATIENCE)
    hold(cluster, at=STEPS)
    assert flow.ended(PATIENCE)["type"] == "COMPLETED", flow.ended()
    assert main(["check", run.url]) == 0
    with storage.connect(run) as con:
        steps = con.execute("select count(*), count(distinct step), max(step) from steps").fetchall()
        ((searchers,),) = con.execute("select count(distinct searcher) from trajectories").fetchall()
    assert steps == [(STEPS, STEPS, STEPS)]
    assert searchers == 4
    assert "role-lost" not in {event["kind"] for event in read_events(run)}
    kept = cluster.run_deployment("retention/nightly", {"root": str(root), "drop_payloads": True})
    until(lambda: cluster.api.state_of(kept)["type"] in FINAL, "the shards are compacted", PATIENCE)
    assert cluster.api.state_of(kept)["type"] == "COMPLETED", cluster.api.state_of(kept)
    assert list((root / "runs/r/compactions").glob("*.parquet"))
    assert main(["check", run.url]) == 0
    for left in cluster.api.flow_runs("RUNNING"):  # their processes were killed, which an automation would notice later
        cluster.api.set_state(left["id"], "CRASHED")


def test_roles_and_their_supervisor_outlive_the_server(cluster: Cluster, root: Path):
    flow = Flow(cluster, root, "r")
    run = flow.run()
    leases = at_work(run, *ROLES)
    cluster.kill("server")
    os.kill(leases["searcher-000"].pid, signal.SIGKILL)
    at_work(run, "searcher-000", life=2)
    finish(run)
    until(lambda: read_state(run).why == "finished", "the run has finished")
    until(lambda: not any(is_running(lease.pid) for lease in read_leases(run) if lease.role != "supervisor"))
    cluster.start_server()
    if cluster.api.state_of(flow.id)["type"] not in FINAL:
        cluster.api.set_state(flow.id, "CRASHED")


def hold(cluster: Cluster, *, at: int) -> None:
    """Hold the trainer after this step. The file is renamed into place, because the trainer may be reading it."""
    (cluster.home / "to-be-held-at").write_text(str(at))
    os.replace(cluster.home / "to-be-held-at", cluster.home / "held-at")


def step_of(run: Run, *, life: int) -> float:
    """Return the step of the trainer in this life or a later one, and 0 in an earlier life."""
    lease = read_lease(run, "trainer")
    return lease.progress.get("step", 0) if lease and lease.life >= life else 0


def searching(run: Run) -> set[str]:
    """Return the searchers that are at work and have appended something."""
    leases = [it for it in read_leases(run) if it.role.startswith("searcher") and it.status not in CLOSED]
    return {it.role for it in leases if it.progress.get("shards")}


def test_a_killed_supervisor_is_retried_and_automations_report_alarms(cluster: Cluster, root: Path):
    with listener() as (address, heard):
        cluster.python("-c", BLOCK, address)
        made = cluster.python(
            "-m", "flows.orchestration.automations", "--tell", "custom-webhook/team", "--silent-after", "10"
        )
        changed = cluster.python("-m", "flows.orchestration.automations", "--tell", "custom-webhook/team")
        assert made == changed and len(made.splitlines()) == 3
        assert sorted(it["name"] for it in cluster.api.call("POST", "/automations/filter", {})) == sorted(
            made.splitlines()
        )

        overrides = {**LIMITS, "limits.orphan_after": 900.0, "search.searchers": 1, "alarms.late_after": 1.0}
        flow = Flow(cluster, root, "r", overrides=overrides)
        run = flow.run()
        leases = at_work(run, *ROLES)
        behave(run, "searcher-000", "hang")
        until(lambda: [it for it in heard if "tba.role-late" in it and "searcher-000" in it], "the alarm is told")
        behave(run, "searcher-000", "work")
        at_work(run, "searcher-000", life=2)

        cluster.kill("worker-tba")
        cluster.python("-m", "flows.orchestration.automations", "--silent-after", "10")
        cluster.python("-c", BEAT, flow.id)  # the last heartbeat; otherwise there is one every thirty seconds
        until(lambda: flow.runs() == 2 or flow.state() in ("CRASHED", "SCHEDULED"), "its silence is noticed", PATIENCE)
        cluster.python("-m", "flows.orchestration.automations")
        cluster.start_workers("tba")
        until(
            lambda: len([e for e in read_events(run) if e["kind"] == "role-adopted"]) == 3, "all are adopted", PATIENCE
        )
        assert read_lease(run, "trainer") == leases["trainer"] or is_running(leases["trainer"].pid)
        finish(run)
        assert flow.ended()["type"] == "COMPLETED"
        until(lambda: [it for it in heard if "tba.run-finished" in it], "good news are told, too")


@contextmanager
def listener() -> Iterator[tuple[str, list[str]]]:
    """Yield an address on loopback, and the list of everything that is posted there."""
    heard: list[str] = []

    class Listener(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Listener) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/", heard
        finally:
            server.shutdown()
            thread.join()
