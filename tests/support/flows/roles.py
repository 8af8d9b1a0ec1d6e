"""Helpers for tests to observe, control and kill the roles of a run."""

import os
import signal
import sys
from pathlib import Path

from flows.supervision.processes import Role, process_of
from storage.runs.leases import Lease, read_leases, readable_lease
from storage.runs.run import Run
from tests.support.waiting import until

SCRIPT_ROLE, HELD_ROLE = (Path(__file__).with_name(name) for name in ("script_role.py", "held_role.py"))

LIMITS = {
    "limits.lease_every": 0.2,
    "limits.silent_after": 3.0,
    "limits.orphan_after": 60.0,
    "limits.stop_grace": 8.0,
    "limits.max_restarts": 2,
    "limits.restart_window": 60.0,
}


TINY = {
    "training.prompts_per_step": 4,
    "training.groups_per_micro_batch": 4,
    "search.prompts_per_round": 8,
    "search.initial_fill": 64,
    "sync.every": 2,
    "sync.checkpoint_every": 4,
    "evaluation.every": 10,
    "evaluation.prompts": 4,
    "limits.lease_every": 0.5,
    "limits.silent_after": 20,
}
"""Settings with which real roles run on a tiny policy."""


def script(role: Role, run: str) -> list[str]:
    """Return the command of a script role."""
    module = "tests.support.flows.script_role"
    return [sys.executable, "-m", module, role.kind, "--run", run, "--index", str(role.index)]


def works(run: Run, role: str, life: int = 1) -> Lease | None:
    """Return the lease of a script role if it works, in this life or a later one."""
    lease = readable_lease(run, role)
    return lease if lease and lease.life >= life and lease.status.startswith("turn") else None


def at_work(run: Run, *roles: str, life: int = 1) -> dict[str, Lease]:
    return {role: until(lambda role=role: works(run, role, life), f"{role} works") for role in roles}


def behave(run: Run, role: str, word: str) -> None:
    folder = Path(run.url) / "behaviour"
    folder.mkdir(exist_ok=True)
    (folder / role).write_text(word)


def finish(run: Run) -> None:
    (Path(run.url) / "finish").touch()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def end_roles(run: Run) -> None:
    """Kill all roles of a run that are left."""
    for lease in read_leases(run):
        role = Role.parse(lease.role)
        if role and process_of(lease, role, run.name):
            os.killpg(lease.pid, signal.SIGKILL)
