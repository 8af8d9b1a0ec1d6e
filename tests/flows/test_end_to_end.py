"""The command `tba run` with real roles as processes, all of which are killed, on a disk and on a real S3 server."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

import storage
from storage.runs.leases import Lease, read_lease, read_leases
from storage.runs.run import Run
from tests.support.flows.roles import TINY
from tests.support.models.tiny import tiny_folder

STEPS = 120
T = TypeVar("T")
ROLES = ("searcher-000", "evaluator", "trainer")
DEADLINE = 120.0
PLANTED = ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "WANDB_API_KEY", "PREFECT_API_KEY", "TBA_PLANTED")


def tba(*arguments: str, log: Path) -> "subprocess.Popen[bytes]":
    with log.open("ab") as output:
        return subprocess.Popen([sys.executable, "-m", "flows.cli", *arguments], stdout=output, stderr=output)


def settings(policy: Path) -> list[str]:
    changes = {"model.path": policy, **TINY, "search.open_rounds": 3}
    return [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]


def until(found: Callable[[], T | None], what: str, log: Path, *, within: float = DEADLINE) -> T:
    ends = time.monotonic() + within
    while time.monotonic() < ends:
        if result := found():
            return result
        time.sleep(0.1)
    pytest.fail(f"{what} after {within:.0f} s:\n{log.read_text()[-3000:]}")


def lease_at(run: Run, role: str, *, step: int = 0, life: int = 1) -> Lease | None:
    """The lease of a role that has come so far, in at least this life."""
    lease = read_lease(run, role)
    return lease if lease and lease.life >= life and lease.progress.get("step", 0) >= step else None


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("root", ["local", pytest.param("ceph", marks=pytest.mark.ceph)], indirect=True)
def test_a_run_survives_the_kill_of_each_role_and_of_its_supervisor(root, tmp_path, monkeypatch):
    """And keeps no secret of its environment, in no object, row or log."""
    for name in PLANTED:
        monkeypatch.setenv(name, os.environ.get(name) or f"planted-{name.lower()}")
    log, policy = tmp_path / "tba.log", tiny_folder(tmp_path / "policy")
    first = tba("run", "quickstart", "--root", root, "--name", "r", "--steps", str(STEPS), *settings(policy), log=log)
    url = f"{root}/runs/r"
    run = until(lambda: opened(url), "the run was not created", log)
    trainer = until(lambda: lease_at(run, "trainer", step=4), "the trainer took no steps", log)
    for role in ROLES:
        os.kill(until(lambda role=role: lease_at(run, role), f"no {role}", log).pid, signal.SIGKILL)
    until(lambda: lease_at(run, "trainer", step=8, life=2), "the trainer was not started again", log)
    first.kill()
    first.wait()
    resumed = tba("resume", url, log=log)
    assert resumed.wait(DEADLINE) == 0, log.read_text()[-3000:]
    assert tba("check", url, log=log).wait(DEADLINE) == 0, log.read_text()[-3000:]
    with storage.connect(run) as con:
        steps = con.execute("select count(*), count(distinct step), max(step) from steps").fetchone()
        scored = con.execute("select min(version), max(version) from evaluations").fetchone()
    assert steps == (STEPS, STEPS, STEPS)
    assert scored == (0, STEPS // 2)
    leases = {lease.role: lease for lease in read_leases(run)}
    assert all(leases[role].life >= 2 for role in ROLES), leases
    assert leases["trainer"].pid != trainer.pid
    secrets = [os.environ[name] for name in PLANTED]
    assert not [(place, it) for place, text in texts(run, log) for it in secrets if it.encode() in text]


def texts(run: Run, log: Path) -> Iterator[tuple[str, bytes]]:
    """All that is stored of a run: every object as it lies there, every view in words, and what was printed."""
    yield "log", log.read_bytes()
    for entry in run.store.list():
        yield entry.key, run.store.read(entry.key)
    with storage.connect(run) as con:
        for (view,) in con.execute("show tables").fetchall():
            yield view, str(con.execute(f"from {view}").fetchall()).encode()


def opened(url: str) -> Run | None:
    try:
        return Run.open(url)
    except FileNotFoundError:
        return None
