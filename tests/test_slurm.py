"""The script for Slurm, on a Slurm of two nodes that are both this machine. They meet at an address of a network."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.harness.servers import free_port
from benchmarks.harness.tiny_models import tiny_folder
from flows.planning import create
from storage import layout
from storage.maintenance.check import check
from storage.runs.control import change_state
from storage.runs.leases import read_lease
from storage.runs.rendezvous import find_rendezvous
from storage.runs.run import Run
from tba.distributed.world import interface_of, own_address_towards
from tests.support.flows.killed_runs import kill, role, rows, stored
from tests.support.flows.live_roles import IN_STEP, settings
from tests.support.waiting import until

DOCS = Path(__file__).parents[1] / "docs"
SCRIPT, PAGE = DOCS / "slurm/trainer.sh", DOCS / "gpus.md"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "sinfo")
ADDRESS = own_address_towards("192.0.2.1", 9) or "127.0.0.1"  # of a network for documentation: nothing is sent
PATH = f"{os.environ['PATH']}:/usr/sbin"
SMALL = ("--gpus-per-node=0", "--cpus-per-task=1")  # what a machine without GPUs has
STEPS = 20

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(shutil.which(it, path=PATH) for it in PROGRAMS),
        reason="needs Slurm (the package slurm-wlm of Debian) and root",
    ),
    pytest.mark.skipif(ADDRESS.startswith("127."), reason="needs an address other than that of loopback"),
]

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=n1 NodeAddr=127.0.0.1 NodeHostname={host} Port={first} CPUs=64 RealMemory=4000 Gres=gpu:8
NodeName=n2 NodeAddr=127.0.0.1 NodeHostname={host} Port={second} CPUs=64 RealMemory=4000 Gres=gpu:8
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Start Slurm, and return its folder."""
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "n1", "n2"):
        (folder / name).mkdir()
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o600)
    ports = {name: free_port() for name in ("controller", "first", "second")}
    configuration = folder / "slurm.conf"
    configuration.write_text(CONFIGURATION.format(folder=folder, host=socket.gethostname(), **ports))
    for number in range(8):  # Slurm looks only whether the files of GPUs are there
        (folder / f"gpu{number}").touch()
    (folder / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu File={folder}/gpu[0-7]\n")
    monkeypatch.setenv("PATH", PATH)
    monkeypatch.setenv("SLURM_CONF", str(configuration))
    munge = [
        f"--{name}={folder}/{file}"
        for name, file in {"socket": "munge", "key-file": "key", "pid-file": "munge.pid", "seed-file": "seed"}.items()
    ]
    with ExitStack() as running:
        for name, command in {
            "munged": ["munged", "--foreground", "--force", *munge],
            "controller": ["slurmctld", "-D", "-f", str(configuration)],
            "n1": ["slurmd", "-D", "-f", str(configuration), "-N", "n1"],
            "n2": ["slurmd", "-D", "-f", str(configuration), "-N", "n2"],
        }.items():
            log = running.enter_context((folder / f"{name}.log").open("wb"))
            process = subprocess.Popen(command, stdout=log, stderr=log)
            running.callback(process.wait, 20)
            running.callback(process.terminate)
            time.sleep(0.5)
        until(lambda: said("sinfo", "--noheader", "--format=%T %D") == "idle 2\n", "both nodes are idle", 60)
        yield folder


def said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout


def own_ranks(script: Path, run: Run) -> Path:
    """Write a script with the commands of docs/gpus.md that let srun start each rank itself."""
    (block,) = re.findall(r"```\n(export MASTER_ADDR.*?)```", PAGE.read_text(), re.S)
    at = re.sub(r"MASTER_ADDR=\$\(.*?\) ", "MASTER_ADDR=127.0.0.1 ", block)  # the name of a node is none of a host here
    text = at.replace("s3://bucket/tba/runs/RUN", run.url).replace("29500", str(free_port()))
    assert text.count(run.url) == 1 and "127.0.0.1" in text
    script.write_text(f"#!/bin/bash\n{text}")
    return script


def test_the_script_trains_on_two_nodes_is_cancelled_in_order_and_goes_on_with_one(
    slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    changes = {**IN_STEP, "training.steps": STEPS}
    run = create.start(settings(tiny_folder(tmp_path / "policy"), **changes), str(tmp_path), "r")
    tried = subprocess.run(["sbatch", "--test-only", str(SCRIPT), run.url], capture_output=True, text=True)
    assert tried.returncode == 0 and "on nodes n[1-2]" in tried.stderr, tried.stderr

    interface = interface_of(ADDRESS)
    assert interface
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{PATH}")
    log = tmp_path / "log"
    submit = ["sbatch", "--parsable", f"--output={log}", *SMALL]
    searcher = role(run, "searcher")
    try:
        job = said(*submit, str(SCRIPT), run.url).strip()
        until(lambda: stored(run, layout.STEPS) >= 3, "three syncs", 200, log=log)
        said("scancel", job)
        until(lambda: (it := read_lease(run, "trainer")) and it.status == "stopped", "rank 0 stops", 90, log=log)
        until(lambda: not said("squeue", "--noheader"), "the job has ended", 90)
        tasks = ["--nodes=1", "--ntasks=2", "--ntasks-per-node=2"]
        one = [*submit, *tasks, "--wait", str(own_ranks(tmp_path / "script", run))]
        ended = subprocess.run(one, timeout=300)
        assert ended.returncode == 0, log.read_text()[-3000:]
    finally:
        change_state(run, desired="stop", why="finished")
        kill(searcher)
    assert [it.size for n in (1, 2) if (it := find_rendezvous(run, n))] == [2, 2]
    assert rows(run, "select count(*), max(step) from steps") == [(STEPS, STEPS)]
    assert [begins for (begins,) in rows(run, "select min(step) from steps_all group by attempt order by 1")][1] > 1
    assert check(run).problems == []
