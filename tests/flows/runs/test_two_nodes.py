"""A trainer on two machines: two network namespaces of Linux, joined by a cable, with two ranks each. They share
nothing but the root of the run. Searchers and trainer go in step, so timing has no influence on what is learned."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.harness.tiny_models import tiny_folder
from flows.planning import create
from storage import layout
from storage.maintenance.check import check
from storage.runs.control import change_state
from storage.runs.rendezvous import find_rendezvous
from storage.runs.run import Run
from tests.support.flows.killed_runs import kill, role, rows, stored
from tests.support.flows.live_roles import IN_STEP, check_nearly_same_steps, settings
from tests.support.waiting import until

PORT = 29400


def _may_make_namespaces() -> bool:
    tried = ["unshare", "--net", "ip", "link", "add", "name", "cable", "type", "veth"]
    return (
        bool(shutil.which("ip") and shutil.which("unshare"))
        and subprocess.run(tried, capture_output=True).returncode == 0
    )


pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not _may_make_namespaces(), reason="needs iproute2 and the right to make network namespaces"),
]


@dataclass(frozen=True)
class Node:
    name: str
    address: str
    folder: Path  # for temporary files and the cache

    def torchrun(self, run: Run, nodes: int, first: str, attempt: int) -> "subprocess.Popen[bytes]":
        command = [
            *("ip", "netns", "exec", self.name, sys.executable, "-m", "torch.distributed.run"),
            *(f"--nnodes={nodes}", "--nproc-per-node=2", "--max-restarts=0", "--rdzv-backend=c10d"),
            *(f"--rdzv-endpoint={first}:{PORT + attempt}", f"--rdzv-id={run.name}-{attempt}"),
            # torchrun does not know the address of a namespace for one of its own.
            f"--rdzv-conf=is_host={int(self.address == first)}",
            *(f"--local-addr={self.address}", "-m", "flows.roles.rank", run.url),
        ]
        own = {name: str(self.folder) for name in ("TMPDIR", "TBA_CACHE", "HOME")}
        with (self.folder / "log").open("ab") as output:
            return subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **own})

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
    made = [Node(f"tba-{os.getpid()}-{n}", f"10.77.0.{n}", tmp_path / f"node {n}") for n in (1, 2)]
    try:
        for node in made:
            node.folder.mkdir()
            ip("netns", "add", node.name)
        first, second = (node.name for node in made)
        ip("-n", first, "link", "add", "name", "cable", "type", "veth", "peer", "name", "cable", "netns", second)
        for node in made:
            ip("-n", node.name, "addr", "add", f"{node.address}/24", "dev", "cable")
            for interface in ("lo", "cable"):
                ip("-n", node.name, "link", "set", interface, "up")
        yield made
    finally:
        for node in made:
            node.clear()
            subprocess.run(["ip", "netns", "del", node.name], capture_output=True)


def start(root: Path, policy: Path, name: str) -> Run:
    changes = {**IN_STEP, "limits.lease_every": 1.0, "limits.silent_after": 8.0}
    return create.start(settings(policy, **changes), str(root), name)


def test_two_nodes_train_and_one_goes_on_when_the_other_is_unplugged(nodes: list[Node], tmp_path: Path):
    policy = tiny_folder(tmp_path / "policy")
    alone, run = (start(tmp_path / "root", policy, name) for name in ("alone", "nodes"))
    searcher, trainer = role(alone, "searcher"), role(alone, "trainer")
    try:
        assert trainer.wait(200) == 0
    finally:
        kill(trainer)
        kill(searcher)
    first, second = nodes
    searcher = role(run, "searcher")
    try:
        begun = [node.torchrun(run, 2, first.address, 1) for node in nodes]
        until(lambda: stored(run, layout.STEPS) >= 3 or begun[0].poll(), "three syncs", 300, log=first.folder / "log")
        assert begun[0].poll() is None, first.log()
        second.unplug()
        assert begun[0].wait(120) != 0, first.log()
        assert first.torchrun(run, 1, first.address, 2).wait(300) == 0, first.log()
    finally:
        change_state(run, desired="stop", why="finished")
        kill(searcher)
        second.clear()
        begun[1].wait(20)
    (failed,) = rows(run, "select message from events where kind = 'failed'")
    assert re.match(r"rank [23] of the trainer \(pid \d+ on \S+\) has given no sign of life", failed[0])
    assert [it.size for n in (1, 2) if (it := find_rendezvous(run, n))] == [4, 2]
    check_nearly_same_steps(run, alone)
    assert check(run).problems == []
