"""A root with a finished run, and one whose roles are alive."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from storage.runs.events import Events
from storage.runs.held_lease import HeldLease
from storage.runs.run import Run
from tba.alarms import Alarm, Alarms
from tests.support.storage.synthetic import make_live_run, make_run


@pytest.fixture
def stored(root: str) -> Run:
    """Return a copy of a run that real roles have stored."""
    kept = Path(__file__).parents[2] / "data/0.1.0-digests/runs/whole"
    return Run.open(str(shutil.copytree(kept, Path(root) / "runs/whole")))


@pytest.fixture
def finished(root: str) -> Run:
    return make_run(root)


@pytest.fixture
def live(root: str) -> Iterator[Run]:
    """Return a run with the leases of all its roles, and with an alarm."""
    run = make_live_run(root)
    told = {
        "searcher-000": {"shards": 5.0, "tokens": 40.0, "trajectories": 30.0, "version": 2.0, "seconds_generate": 3.0},
        "searcher-001": {"shards": 4.0, "tokens": 50.0, "trajectories": 24.0, "version": 1.0, "seconds_wait": 1.0},
        "trainer": {"step": 5.0, "version": 2.0, "loss": 0.125, "reward_mean": 0.5},
        "evaluator": {"scored": 1.0},
    }
    with ExitStack() as stack:
        for role, progress in told.items():
            lease = stack.enter_context(HeldLease(run, role, every=3600.0))
            lease.tell("working", **progress)
            lease.renew()
        alarms = Alarms(Events(run, "supervisor", 1).write)
        alarms.update([Alarm("disk-filling", "1 GB is free", "host", "error"), Alarm("role-late", "late", "trainer")])
        alarms.update([Alarm("disk-filling", "1 GB is free", "host", "error")])
        yield run
