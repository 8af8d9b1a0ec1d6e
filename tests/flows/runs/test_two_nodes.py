"""A trainer on two machines: two network namespaces of Linux, joined by a bridge, with up to two ranks each. They share
nothing but the root of the run. Searchers and trainer go in step, so timing has no influence on what is learned."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.harness import servers
from benchmarks.harness.tiny_models import tiny_folder
from flows.planning import create
from storage import layout
from storage.maintenance.check import check
from storage.objects.open_store import open_store
from storage.runs.control import change_state
from storage.runs.leases import read_lease
from storage.runs.rendezvous import find_rendezvous
from storage.runs.run import Run
from tba.runtime.child import module_command
from tests.conftest import s3_root, skipping_unless
from tests.support.flows.killed_runs import kill, role, rows, stored
from tests.support.flows.live_roles import IN_STEP, check_nearly_same_steps, settings
from tests.support.vllm import needs_vllm, served_folder
from tests.support.waiting import until

PORT = 29400
BRIDGE, HOST = f"tba{os.getpid()}", "10.77.0.254"


def _may_make_namespaces() -> bool:
    tried = ["unshare", "--net", "ip", "link", "add", "name", "cable", "type", "veth"]
    return (
        bool(shutil.which("ip") and shutil.which("unshare"))
        and subprocess.run(tried, capture_output=True).returncode == 0
    )


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not _may_make_namespaces(), reason="needs iproute2 and the right to make network namespaces"),
]


@dataclass(frozen=True)
class Node:
    name: str
    address: str
    folder: Path  # for temporary files and the cache

    def start(self, *command: str) -> "subprocess.Popen[bytes]":
        own = {name: str(self.folder) for name in ("TMPDIR", "TBA_CACHE", "HOME")}
        with (self.folder / "log").open("ab") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command], stdout=output, stderr=output, env={**os.environ, **own}
            )

    def torchrun(self, run: Run, nodes: int, ranks: int, first: str, attempt: int) -> "subprocess.Popen[bytes]":
        return self.start(
            *(sys.executable, "-m", "torch.distributed.run"),
            *(f"--nnodes={nodes}", f"--nproc-per-node={ranks}", "--max-restarts=0", "--rdzv-backend=c10d"),
            *(f"--rdzv-endpoint={first}:{PORT + attempt}", f"--rdzv-id={run.name}-{attempt}"),
            # torchrun does not know the address of a namespace for one of its own.
            f"--rdzv-conf=is_host={int(self.address == first)}",
            *(f"--local-addr={self.address}", "-m", "flows.roles.rank", run.url),
        )

    def searcher(self, run: Run) -> "subprocess.Popen[bytes]":
        return self.start(*module_command("flows.roles.role"), "searcher", "--run", run.url)

    def unplug(self) -> None:
        ip("-n", self.name, "link", "set", "cable", "down")

    def log(self) -> str:
        return (self.folder / "log").read_text()[-3000:]

    def clear(self) -> None:
        """Kill every process of this node."""
        listed = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True)
        for pid in listed.stdout.split():
            subprocess.run(["kill", "-9", pid], capture_output=True)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    """Three machines. The machine of the test is at the same bridge, at the address HOST."""
    here = ["netns", str(os.getpid())]  # the namespace of this process
    made = [Node(f"{BRIDGE}-{n}", f"10.77.0.{n}", tmp_path / f"node-{n}") for n in (1, 2, 3)]
    try:
        ip("link", "add", "name", BRIDGE, "type", "bridge")
        ip("addr", "add", f"{HOST}/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        for node in made:
            node.folder.mkdir()
            ip("netns", "add", node.name)
            ip("-n", node.name, "link", "add", "name", "cable", "type", "veth", "peer", "name", node.name, *here)
            ip("link", "set", node.name, "master", BRIDGE, "up")
            ip("-n", node.name, "addr", "add", f"{node.address}/24", "dev", "cable")
            for interface in ("lo", "cable"):
                ip("-n", node.name, "link", "set", interface, "up")
        yield made
    finally:
        for node in made:
            node.clear()
            # Together with its namespace, the cable would be removed only a while later.
            subprocess.run(["ip", "link", "del", node.name], capture_output=True)
            subprocess.run(["ip", "netns", "del", node.name], capture_output=True)
        subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True)


def start(root: str, policy: str | Path, name: str, **changes: object) -> Run:
    limits = {"limits.lease_every": 1.0, "limits.silent_after": 8.0}
    config = settings(Path(policy), **{**IN_STEP, "training.steps": 10, **limits, **changes})
    return create.start(config, root, name)


def attempts(run: Run) -> list[int]:
    """Return the number of ranks of each attempt."""
    found = (find_rendezvous(run, attempt) for attempt in range(1, 10))
    return [it.size for it in found if it]


def kill_rank_0(run: Run) -> None:
    lease = read_lease(run, "trainer")
    assert lease
    os.kill(lease.pid, signal.SIGKILL)


@pytest.mark.long
@pytest.mark.parametrize("copy_per", ["trainer", "node"])
def test_the_rest_goes_on_when_rank_0_is_killed_and_when_a_node_is_unplugged(
    nodes: list[Node], tmp_path: Path, copy_per: str
):
    policy, root = tiny_folder(tmp_path / "policy"), str(tmp_path / "root")
    changes = {"training.copy_per": copy_per, "task.name": "tests.support.flows.live_roles:OddTokens"}
    alone, run = (start(root, policy, name, **changes) for name in ("alone", "nodes"))
    searcher, trainer = role(alone, "searcher"), role(alone, "trainer")
    try:
        assert trainer.wait(200) == 0
    finally:
        kill(trainer)
        kill(searcher)
    first, second, _ = nodes
    log, searcher = first.folder / "log", role(run, "searcher")

    def begin(ranks: int, attempt: int, *, syncs: int) -> "list[subprocess.Popen[bytes]]":
        begun = [node.torchrun(run, 2, ranks, first.address, attempt) for node in (first, second)]
        until(lambda: stored(run, layout.STEPS) >= syncs or begun[0].poll(), f"{syncs} syncs", 300, log=log)
        assert begun[0].poll() is None, first.log()
        return begun

    try:
        begun = begin(2, 1, syncs=3)
        kill_rank_0(run)
        assert all(it.wait(120) != 0 for it in begun), first.log()

        begun = begin(1, 2, syncs=6)
        second.unplug()
        assert begun[0].wait(120) != 0, first.log()
        assert first.torchrun(run, 1, 2, first.address, 3).wait(300) == 0, first.log()
    finally:
        change_state(run, desired="stop", why="finished")
        kill(searcher)
        for node in nodes:
            node.clear()
        begun[1].wait(20)
    (failed,) = rows(run, "select message from events where kind = 'failed'")
    assert re.match(r"rank 1 of the trainer \(pid \d+ on \S+\) has given no sign of life", failed[0])
    assert attempts(run) == [4, 2, 2]
    stored_by = 2 if copy_per == "node" else 4  # the ranks of one copy
    parts = [it.key for it in run.store.list(f"{layout.CHECKPOINTS}000002-a0001/optimizer")]
    assert len(parts) == stored_by and all(f"-of-{stored_by:05}" in key for key in parts)
    check_nearly_same_steps(run, alone)
    assert check(run).problems == []


@pytest.mark.parametrize("engine", [pytest.param("vllm", marks=needs_vllm)])
def test_nodes_with_a_bucket_alone_between_them_learn_from_vllm_on_another_node(
    nodes: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
):
    with skipping_unless("TBA_TESTS_NEED_CEPH"), servers.ceph(tmp_path, HOST) as server:
        root = s3_root(server, monkeypatch)
        for file in served_folder(tmp_path / "policy").iterdir():
            open_store(root).upload(file, f"policy/{file.name}")
        changes = {
            "model.path": f"{root}/policy", "search.temperature": 1.0, "engine.name": engine, "engine.profile": "safe",
            "engine.cache_gigabytes": 0.25,
        }  # fmt: skip
        run = start(root, tmp_path / "policy", "nodes", **changes)
        (first, second, third), log = nodes, tmp_path / "node-1/log"
        begun, searcher = [it.torchrun(run, 2, 2, first.address, 1) for it in (first, second)], third.searcher(run)
        try:
            ends = (begun[0], searcher)
            until(lambda: stored(run, layout.STEPS) >= 3 or any(it.poll() for it in ends), "three syncs", 400, log=log)
            assert not any(it.poll() for it in ends), f"{first.log()}\n{third.log()}"
            kill_rank_0(run)
            assert all(it.wait(200) != 0 for it in begun), first.log()
            begun = [it.torchrun(run, 2, 1, first.address, 2) for it in (first, second)]
            assert [it.wait(300) for it in begun] == [0, 0], first.log()
            assert searcher.poll() is None, third.log()
            change_state(run, desired="stop", why="finished")
            assert searcher.wait(60) == 4, third.log()
        finally:
            for node in nodes:
                node.clear()
        assert attempts(run) == [4, 2]
        assert rows(run, "select count(*), max(step) from steps") == [(10, 10)]
        assert check(run).problems == []
