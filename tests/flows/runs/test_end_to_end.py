"""The command `tba run` with real roles as processes, all of which are killed, on a disk and on a real S3 server."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import storage
from benchmarks.harness.tiny_models import tiny_folder
from storage.runs.leases import read_leases
from storage.runs.run import Run
from tests.support.flows.command_line import DEADLINE, lease_at, opened, tba
from tests.support.flows.roles import TINY
from tests.support.waiting import until

STEPS = 36
ROLES = ("searcher-000", "evaluator", "trainer")
PLANTED = ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "WANDB_API_KEY", "PREFECT_API_KEY", "TBA_PLANTED")


def settings(policy: Path) -> list[str]:
    changes = {"model.path": policy, **TINY, "search.open_rounds": 3}
    return [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "root", ["local", pytest.param("ceph", marks=(pytest.mark.ceph, pytest.mark.long))], indirect=True
)
def test_a_run_survives_the_kill_of_each_role_and_of_its_supervisor(root, tmp_path, monkeypatch):
    """It also keeps no secret of its environment in any object, row or log."""
    for name in PLANTED:
        monkeypatch.setenv(name, os.environ.get(name) or f"planted-{name.lower()}")
    log, policy = tmp_path / "tba.log", tiny_folder(tmp_path / "policy")
    first = tba("run", "quickstart", "--root", root, "--name", "r", "--steps", str(STEPS), *settings(policy), log=log)
    url = f"{root}/runs/r"
    run = until(lambda: opened(url), "the run is created", DEADLINE, log=log)
    trainer = until(lambda: lease_at(run, "trainer", step=4), "the trainer takes four steps", DEADLINE, log=log)
    for role in ROLES:
        os.kill(until(lambda role=role: lease_at(run, role), f"{role} starts", DEADLINE, log=log).pid, signal.SIGKILL)
    until(lambda: lease_at(run, "trainer", step=8, life=2), "the trainer starts again and learns", DEADLINE, log=log)
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
    """Yield everything that a run leaves: the bytes of every object, the text of every view, and the log."""
    yield "log", log.read_bytes()
    for entry in run.store.list():
        yield entry.key, run.store.read(entry.key)
    with storage.connect(run) as con:
        for (view,) in con.execute("show tables").fetchall():
            yield view, str(con.execute(f"from {view}").fetchall()).encode()
