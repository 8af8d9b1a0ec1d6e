"""A trainer whose ranks are started by flow runs of `trainer-node`: two on this machine, which do as if each had a
machine of its own. They meet at an address of a network, and read the rest from storage."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.tiny_models import tiny_folder
from flows.orchestration.local_server import FINAL, Stack
from storage.maintenance.check import check
from storage.runs.events import read_events
from storage.runs.leases import read_lease
from storage.runs.rendezvous import find_rendezvous
from storage.runs.run import Run
from tba.distributed.world import own_address_towards
from tests.support.flows.killed_runs import rows
from tests.support.flows.prefect_flow import Flow
from tests.support.flows.roles import TINY, end_roles
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 12
ADDRESS = own_address_towards("192.0.2.1", 9)  # of a network for documentation: nothing is sent


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for folder in tmp_path.glob("runs/*"):
        end_roles(Run.open(str(folder)))


class Node(Flow):
    """One flow run of `trainer-node`."""

    def __init__(self, stack: Stack, run: Run, node: int, **parameters: Any):
        self.stack, self.url = stack, run.url
        deployment = stack.api.call("GET", "/deployments/name/trainer-node/quickstart")["id"]
        asked = {"parameters": {"run": run.url, "nodes": 2, "node": node, **parameters}}
        self.id = stack.api.call("POST", f"/deployments/{deployment}/create_flow_run", asked)["id"]


@pytest.mark.long
@pytest.mark.skipif(not ADDRESS or ADDRESS.startswith("127."), reason="needs an address other than that of loopback")
def test_two_nodes_lead_a_run_and_two_others_go_on_after_one_has_failed(stack: Stack, root: Path):
    overrides = {
        "model.path": str(tiny_folder(root / "policy")),
        **TINY,
        "limits.silent_after": 6,
        "search.searchers": 1,
    }
    flow = Flow(stack, root, "r", steps=STEPS, overrides=overrides, external_trainer=True)
    run = flow.run()
    until(lambda: read_lease(run, "searcher-000"), "a searcher searches", 120)
    first = [Node(stack, run, 1), Node(stack, run, 0, address=ADDRESS)]
    until(lambda: (it := read_lease(run, "trainer")) and it.progress.get("step", 0) >= 4, "the trainer learns", 200)
    led = read_lease(run, "trainer")
    assert led
    os.kill(led.pid, signal.SIGKILL)
    assert [it.ended(150)["name"] for it in first] == ["Failed", "Failed"]
    assert "rank 1: " in first[0].ended()["message"], "the end of the log of its ranks"

    second = [Node(stack, run, 1), Node(stack, run, 0, address=ADDRESS)]
    assert flow.ended(240)["type"] == "COMPLETED", flow.log()
    assert [it.ended()["type"] for it in second] == ["COMPLETED", "COMPLETED"]
    assert rows(run, "select count(*), max(step) from steps") == [(STEPS, STEPS)]
    assert [it.size for n in (1, 2) if (it := find_rendezvous(run, n))] == [2, 2]
    assert check(run).problems == []
    said = [(it["kind"], it["data"].get("of")) for it in read_events(run) if it["role"] == "supervisor"]
    assert ("role-started", "trainer") not in said and ("role-restarting", "trainer") not in said
    assert (root / "runs/r/logs/trainer-node-001-0002.log").exists()


@pytest.mark.long
def test_a_place_that_cannot_be_is_told_in_the_state_of_the_flow_run(stack: Stack, root: Path):
    run = Flow(stack, root, "r", external_trainer=True).run()
    node = Node(stack, run, 2)
    state = node.ended()
    assert state["type"] in FINAL and state["name"] == "Misused"
    assert "node: must be between 0 and 1, got 2" in state["message"]
