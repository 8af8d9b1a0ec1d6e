"""Readers of stored bytes, for damaged input."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from storage.log.compactions import Compactions
from storage.log.ledger import read_entries
from storage.log.prompts import read_prompts
from storage.log.sync_records import read_chain
from storage.maintenance.compactor import compact
from storage.runs.arithmetic import find_arithmetic
from storage.runs.attempts import chain
from storage.runs.control import read_state
from storage.runs.events import read_events
from storage.runs.held_lease import HeldLease
from storage.runs.leases import read_leases
from storage.runs.run import Run
from storage.weights.checkpoints import Checkpoints
from storage.weights.evaluations import Evaluations
from storage.weights.versions import Versions
from tests.support.storage.synthetic import SyntheticRun, make_run


def load_versions(run: Run) -> None:
    versions = Versions(run)
    for version in versions.complete():
        for ask in (versions.step, versions.weights_sha256, versions.base, versions.load):
            ask(version)


def load_checkpoints(run: Run) -> None:
    for sync, attempt in (checkpoints := Checkpoints(run)).complete():
        checkpoints.load(sync, attempt)


def replay(run: Run) -> None:
    buffer = SyntheticRun.of(run).buffer(2)
    for sync in range(5):
        buffer.sync(sync, step=2 * sync)
    buffer.fetch(buffer.draw(9))


def read_ledger(run: Run) -> None:
    for sync, attempt in ((1, 1), (2, 1), (3, 2), (4, 2)):
        read_entries(run, sync, attempt)


READERS: Mapping[str, Callable[[Run], Any]] = {
    "run.json": lambda run: Run.open(run.url),
    "control": read_state,
    "roles": read_leases,
    "events": read_events,
    "versions": load_versions,
    "checkpoints": load_checkpoints,
    "syncs": read_chain,
    "attempts": chain,
    "arithmetic": lambda run: find_arithmetic(run, 2),
    "prompts": lambda run: [read_prompts(run, split) for split in ("train", "test")],
    "steps": read_ledger,
    "draws": read_ledger,
    "compactions": lambda run: Compactions(run).look(),
    "evaluations": lambda run: (Evaluations(run).scores(), Evaluations(run).examples()),
    "trajectories": replay,
}
"""The reader of each kind of object. Other objects are read by `check`, the views and the list of runs."""


def make_whole_run(folder: Path) -> Run:
    """Make a run with an object of every kind."""
    made = make_run(str(folder))
    with HeldLease(made, "trainer", every=60) as lease:
        lease.tell("step 8 of 8", step=8.0)
    compact(made, keep_checkpoints=1)
    return made
