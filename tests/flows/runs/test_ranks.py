"""A run whose trainer is spread over two processes, with real roles: one of the ranks is killed, then the trainer."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

import storage
from benchmarks.harness.tiny_models import tiny_folder
from storage.runs.run import Run
from tests.support.flows.command_line import DEADLINE, lease_at, opened, tba
from tests.support.flows.roles import TINY, is_running
from tests.support.waiting import until

STEPS = 32


def ranks_of(trainer: int) -> list[int]:
    """Return the pids of the processes that a trainer has started as its ranks."""
    listed = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(trainer)], capture_output=True, text=True)
    return [int(line.split()[0]) for line in listed.stdout.splitlines() if "flows.roles.rank" in line]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("root", ["local"], indirect=True)
def test_a_run_survives_the_kill_of_a_rank_and_of_a_trainer_with_ranks(root, tmp_path):
    log, policy = tmp_path / "tba.log", tiny_folder(tmp_path / "policy")
    changes = {"model.path": policy, **TINY, "training.ranks": 2, "training.groups_per_micro_batch": 1}
    settings = [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    command = ("run", "quickstart", "--root", root, "--name", "r", "--steps", str(STEPS), *settings)
    process, url = tba(*command, log=log), f"{root}/runs/r"
    run = until(lambda: opened(url), "the run is created", DEADLINE, log=log)
    first = until(lambda: lease_at(run, "trainer", step=4), "the trainer takes four steps", DEADLINE, log=log)
    (other,) = ranks_of(first.pid)
    os.kill(other, signal.SIGKILL)
    second = until(
        lambda: lease_at(run, "trainer", step=12, life=2), "the trainer starts again and learns", DEADLINE, log=log
    )
    assert re.search(rf"rank 1 of the trainer \(pid {other} on \S+\) has died \(SIGKILL\)", events_of(run)), (
        log.read_text()[-3000:]
    )
    (other,) = ranks_of(second.pid)
    os.kill(second.pid, signal.SIGKILL)
    until(lambda: not is_running(other), "the rank ends after its trainer", DEADLINE, log=log)
    assert process.wait(120) == 0, log.read_text()[-3000:]
    assert tba("check", url, log=log).wait(60) == 0, log.read_text()[-3000:]
    assert tba("audit", url, "--step", str(STEPS - 1), log=log).wait(120) == 0, log.read_text()[-3000:]
    with storage.connect(run) as con:
        steps = con.execute("select count(*), count(distinct step), max(step) from steps").fetchone()
    assert steps == (STEPS, STEPS, STEPS)
    assert any(Path(run.url, "checkpoints").glob("*/optimizer-00001-of-00002.safetensors"))


def events_of(run: Run) -> str:
    with storage.connect(run) as con:
        return "\n".join(message for (message,) in con.execute("select message from events").fetchall())
