"""Forks of synthetic runs, and the rows of their views."""

import storage
from storage.runs.attempts import newest_attempt
from storage.runs.control import change_state
from storage.runs.forks import register
from storage.runs.inheritance import Parent
from storage.runs.run import Run
from storage.weights.attempt_claim import claim_attempt
from tba.types import Version
from tests.support.storage.synthetic import EVERY, LAST_SYNC, SyntheticRun


def fork(parent: Run, sync: int, name: str = "fork", *, replays: int | None = None) -> Run:
    """Fork a synthetic run after a sync. Syncs up to 2 belong to its first attempt, later ones to its second."""
    origin = Parent(
        run=parent.name, step=sync * EVERY, sync=sync, attempt=1 if sync <= 2 else 2, attempts=newest_attempt(parent),
        replays=replays, rebuilt=sync % 2 == 1,
    )  # fmt: skip
    register(parent, name, origin)
    run = Run.create(
        parent.root, name, config=parent.config, sampler_sql=parent.sampler_sql, code_version="test", parent=origin
    )
    change_state(run, desired="run", searchers=2, why="forked")
    return run


def go_on(run: Run, sync: int) -> None:
    """Finish a fork, from the checkpoint that it shares with its parent."""
    made = SyntheticRun.of(run)
    attempt = claim_attempt(run)
    assert attempt.continues == (Version(sync, run.parent.attempt) if sync and run.parent else None)
    made.publish(Version(sync, attempt.number))
    buffer = made.buffer(attempt.number)
    buffer.replay(sync)
    version = Version(sync, attempt.number)
    made.take_syncs(attempt.number, range(sync + 1, LAST_SYNC + 1), buffer, version=version)


def rows(run: Run, query: str) -> list[tuple]:
    with storage.connect(run) as con:
        return con.execute(query).fetchall()
