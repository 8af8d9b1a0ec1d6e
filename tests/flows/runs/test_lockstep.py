"""Searchers and trainer in step: each window of steps learns from one round of the version that the lag prescribes."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.harness.step_queries import DRAWS, LEDGER
from benchmarks.harness.tiny_models import tiny_folder
from flows.planning import create
from flows.supervision.processes import FINISHED, STOPPED
from storage import layout
from storage.maintenance.check import check
from storage.runs.control import change_state
from storage.runs.run import Run
from storage.weights.memory_versions import MEMORY
from tests.support.flows.killed_runs import RoleProcess, kill, role, rows, stored
from tests.support.flows.live_roles import settings
from tests.support.waiting import until

SEARCHERS = 2
ROWS = """
select trajectory_id, round, slot, prompt_id, response_tokens, behaviour_logps, ref_logps, reward, version_start,
    version_end
from trajectories order by all
"""
ADOPTED = "select data->>'folder' from events where kind = 'version-adopted'"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("policy") / "tiny")


def start(root: Path, policy: Path, name: str, *, lag: int, every: int, steps: int, transport: str = "storage") -> Run:
    changes = {
        "sync.transport": transport,
        "training.steps": steps,
        "sync.lag": lag,
        "sync.every": every,
        "sync.checkpoint_every": 3,
        "sync.keep_versions": lag + 2,
        "sampling.recent_share": 1.0,
        "search.searchers": SEARCHERS,
        "search.prompts_per_round": 2 * every,
        "training.weight_decay": 0.5,  # so that versions differ, whatever the rewards are
    }
    return create.start(settings(policy, **changes), str(root), name)


def roles_of(run: Run) -> dict[str, RoleProcess]:
    searchers = {f"searcher {n}": role(run, "searcher", "--index", str(n)) for n in range(SEARCHERS)}
    return {"trainer": role(run, "trainer"), **searchers}


def end(run: Run, roles: Mapping[str, RoleProcess]) -> None:
    """Stop the searchers once the trainer has finished, as a supervisor does."""
    try:
        assert roles["trainer"].wait(120) == FINISHED
        change_state(run, desired="stop", why="finished")
        assert [it.wait(60) for name, it in roles.items() if name != "trainer"] == [STOPPED] * SEARCHERS
    finally:
        for process in roles.values():
            if process.poll() is None:
                kill(process)


def found(run: Run) -> list[tuple]:
    """Check what each sync admits. Return each step with the smallest and largest age in its batch."""
    assert check(run).problems == []
    admitted = rows(run, "select sync, searcher, seq from shards where sync is not null order by all")
    syncs = range(admitted[-1][0] + 1)
    assert admitted == [(sync, searcher, sync) for sync in syncs for searcher in range(SEARCHERS)]
    return rows(run, "select step, min(age), max(age) from draws group by step order by step")


@pytest.mark.long
@pytest.mark.parametrize("transport", ["storage", "shared-memory"])
def test_synchronous_training_is_on_policy_and_takes_the_same_steps_after_a_kill(
    policy: Path, tmp_path: Path, transport: str
):
    """The two runs share nothing. As no role runs ahead of another, timing has no influence on what is learned."""
    whole, killed = (
        start(tmp_path, policy, name, lag=0, every=1, steps=10, transport=transport) for name in ("whole", "killed")
    )
    end(whole, roles_of(whole))
    roles = roles_of(killed)
    try:
        until(lambda: stored(killed, layout.STEPS) >= 5, "five syncs")
    finally:
        for process in roles.values():
            kill(process)
    end(killed, roles_of(killed))
    assert found(whole) == found(killed) == [(step, 0, 0) for step in range(1, 11)]
    assert rows(killed, "select max(attempt) from attempts") == [(2,)]
    assert rows(whole, LEDGER) == rows(killed, LEDGER)
    assert rows(whole, DRAWS) == rows(killed, DRAWS)


def test_a_lag_is_the_same_at_every_step_once_it_has_built_up(policy: Path, tmp_path: Path):
    run = start(tmp_path, policy, "behind", lag=2, every=2, steps=12)
    end(run, roles_of(run))
    versions = [2 * max(0, (step - 1) // 2 - 2) for step in range(1, 13)]  # steps of the generating versions
    assert found(run) == [(step, step - 1 - version, step - 1 - version) for step, version in enumerate(versions, 1)]


def test_roles_that_wait_for_a_round_stop_when_asked_to(policy: Path, tmp_path: Path):
    run = start(tmp_path, policy, "stopped", lag=0, every=1, steps=1000)
    roles = roles_of(run)
    try:
        until(lambda: stored(run, layout.STEPS) >= 2, "two syncs")
        change_state(run, desired="stop", why="a test")
        assert [it.wait(60) for it in roles.values()] == [STOPPED] * (1 + SEARCHERS)
    finally:
        for process in roles.values():
            if process.poll() is None:
                kill(process)
    assert check(run).problems == []


def test_versions_that_come_through_memory_leave_the_same_log_as_stored_ones(policy: Path, tmp_path: Path):
    stored_first, in_memory = (
        start(tmp_path, policy, name.replace("-", "_"), lag=1, every=1, steps=6, transport=name)
        for name in ("storage", "shared-memory")
    )
    for run in (stored_first, in_memory):
        end(run, roles_of(run))
    assert found(stored_first) == found(in_memory)
    for query in (LEDGER, DRAWS, ROWS):
        assert rows(stored_first, query) == rows(in_memory, query)
    of_run = [
        {Path(folder).is_relative_to(MEMORY) for (folder,) in rows(run, ADOPTED)} for run in (stored_first, in_memory)
    ]
    assert of_run[0] == {False}
    assert True in of_run[1]
