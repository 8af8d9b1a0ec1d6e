"""Runs the command `tba`, in the process of a test or in one of its own, and looks for its effects."""

import subprocess
import sys
from pathlib import Path

import pytest

from flows.cli import main
from storage.runs.leases import Lease, read_lease
from storage.runs.run import Run

DEADLINE = 120.0


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that refuses its arguments or input. Return the error, which is one line without a traceback."""
    assert main(arguments) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


def tba(*arguments: str, log: Path) -> "subprocess.Popen[bytes]":
    with log.open("ab") as output:
        return subprocess.Popen([sys.executable, "-m", "flows.cli", *arguments], stdout=output, stderr=output)


def lease_at(run: Run, role: str, *, step: int = 0, life: int = 1) -> Lease | None:
    """Return the lease of a role if it has reached this step, in this life or a later one."""
    lease = read_lease(run, role)
    return lease if lease and lease.life >= life and lease.progress.get("step", 0) >= step else None


def opened(url: str) -> Run | None:
    try:
        return Run.open(url)
    except FileNotFoundError:
        return None
