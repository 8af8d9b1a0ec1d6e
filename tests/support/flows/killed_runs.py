"""Runs whose roles are processes that a test kills."""

import os
import signal
import subprocess
import sys

import storage
from storage.runs.run import Run


def rows(run: Run, query: str) -> list[tuple]:
    with storage.connect(run) as con:
        return con.execute(query).fetchall()


def role(run: Run, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "flows.roles.role", *arguments, "--run", run.url]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


def kill(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def stored(run: Run, prefix: str) -> int:
    return len(run.store.list(prefix))
