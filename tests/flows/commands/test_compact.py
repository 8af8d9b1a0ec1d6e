"""A run of real roles is compacted between the lives of its trainer. It takes the same steps as without compaction, and
says from which step on it can still be audited and forked."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.step_queries import DRAWS, LEDGER
from benchmarks.harness.tiny_models import tiny_folder
from flows import cli
from flows.commands import audit, fork
from flows.commands.compact import compact_all, compact_run, describe
from flows.planning import create
from flows.roles import wiring
from storage import layout
from storage.log.compactions import Compactions
from storage.maintenance.check import check
from storage.maintenance.compactor import Compacted
from storage.runs.control import change_state
from storage.runs.run import Run
from storage.weights.attempt_claim import claim_attempt
from tba.errors import ConfigError
from tba.types import Version
from tests.support.flows.killed_runs import kill, role, rows, stored
from tests.support.flows.live_roles import live, settings
from tests.support.storage.indexes import drawable
from tests.support.storage.oracle import Oracle, Row
from tests.support.storage.synthetic import EVERY, B, K, S, SyntheticRun, make_live_run, make_run
from tests.support.waiting import until

STEPS, CAPACITY = 20, 4


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("policy") / "tiny")


@pytest.fixture(scope="module")
def compacted(tmp_path_factory: pytest.TempPathFactory, policy: Path) -> Iterator[Run]:
    """Return a run whose trainer was killed. It was compacted while the searcher went on, and again at its end."""
    changes = {"training.steps": STEPS, "sync.checkpoint_every": 2, "sync.keep_checkpoints": 2}
    changes |= {"training.responses_per_prompt": 4, "sampling.capacity": CAPACITY}
    run = create.start(settings(policy, **changes), str(tmp_path_factory.mktemp("root")), "whole")
    searcher, trainer = role(run, "searcher"), role(run, "trainer")
    try:
        until(lambda: stored(run, layout.SYNCS) >= 7, "seven records")
        kill(trainer)
        assert compact_run(run).shards > 0
        trainer = role(run, "trainer")
        assert trainer.wait(120) == 0
        change_state(run, desired="stop", why="finished")
        assert searcher.wait(60) == 4
    finally:
        for process in (searcher, trainer):
            if process.poll() is None:
                kill(process)
    compact_run(run)
    yield run


def copied(run: Run, folder: Path) -> Run:
    """Return a copy of the run, without its forks."""
    url = layout.run_url(str(folder), run.name)
    shutil.copytree(run.url, url, ignore=shutil.ignore_patterns("forks"))
    return Run.open(url)


def test_a_compacted_and_resumed_run_took_the_steps_of_one_that_replays_it_unbroken(compacted: Run):
    run = fork.fork(compacted, 0, {}, name="unbroken", replay=True)
    assert live(run, "trainer", wiring.run_trainer) == []
    assert rows(compacted, LEDGER) == rows(run, LEDGER)
    assert rows(compacted, DRAWS) == rows(run, DRAWS)
    assert len(rows(run, LEDGER)) == STEPS
    assert check(run).problems == check(compacted).problems == []


def test_every_step_of_a_compacted_run_can_be_audited(compacted: Run):
    for step in (1, 9, STEPS):
        assert audit.audit(compacted, step).ok


def test_steps_before_what_was_given_up_are_refused_and_later_ones_are_not(
    compacted: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = copied(compacted, tmp_path)
    assert cli.main(["compact", run.url, "--drop-payloads", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["payloads_given_up"] > 0 and done["retention"]
    oldest = int(done["upto"].split("-")[0]) * 2  # a sync is two steps
    assert audit.audit(run, oldest + 1).ok
    assert audit.audit(run, STEPS).ok
    name = rf"retention/{done['retention']:06d}\.json"
    for step in (1, oldest):
        with pytest.raises(ConfigError, match=rf"{name} of .*; steps can be repeated from step {oldest + 1} on"):
            audit.audit(run, step)
    with pytest.raises(ConfigError, match=rf"{name} of .*; a fork can start from step {oldest} or later"):
        fork.fork(run, 2, {}, name="early")
    with pytest.raises(ConfigError, match=rf"sampling.capacity must be at most {CAPACITY}, .* got 50"):
        fork.fork(run, oldest, {"sampling.capacity": "50"}, name="wide", replay=True)
    assert not run.store.list(layout.FORKS)
    later = fork.fork(run, oldest, {}, name="later", replay=True)
    assert live(later, "trainer", wiring.run_trainer) == []
    assert rows(later, LEDGER) == rows(run, LEDGER)
    assert check(run).problems == check(later).problems == []


def test_a_fork_keeps_what_it_replays(compacted: Run, tmp_path: Path):
    run = copied(compacted, tmp_path)
    forked = fork.fork(run, 0, {}, name="all", replay=True)
    done = compact_run(run, drop_payloads=True)
    assert done.payloads_given_up == 0
    assert "still be drawn by this run or its forks (all)" in describe(done, drop_payloads=True)
    assert live(forked, "trainer", wiring.run_trainer) == []
    assert rows(forked, LEDGER) == rows(run, LEDGER)


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param({"sampling.evict": "worst", "sampling.capacity": K}, marks=pytest.mark.long),
        {"sampling.copies": "all", "sampling.capacity": 3 * S},
    ],
)
def test_a_trainer_that_resumes_after_a_compaction_draws_by_the_rule_of_its_run(tmp_path: Path, rule: dict[str, Any]):
    """Rewards differ only in a synthetic run, whose trainer has no model."""
    changes = {**rule, "sampling.inv_temp": 1.0, "training.steps": 20}
    made = SyntheticRun(str(tmp_path), "first", **changes)
    made.says_the_same = "sampling.copies" in rule
    made.begin()
    made.take_syncs(1, range(1, 7), made.buffer(1), version=Version(0, 1))
    assert cli.main(["compact", made.run.url, "--drop-payloads"]) == 0
    attempt = claim_attempt(made.run)
    assert attempt.continues == Version(6, 1)
    buffer = made.buffer(attempt.number)
    buffer.replay(6)
    buffer.restore(made.queues[6])
    for sync in range(7, 11):
        held = set(drawable(buffer.index))
        assert held == {it for (it,) in rows(made.run, f"select trajectory_id from eligible_at({sync - 1})")}
        made.take_syncs(attempt.number, [sync], buffer, version=Version(0, 1))
    given_up = "select count(*) filter (response_tokens is null), count(*) from trajectories"
    drawn = f"{given_up} where trajectory_id in (select trajectory_id from draws where step > 12)"
    [(without, _)], [(none, some)] = rows(made.run, given_up), rows(made.run, drawn)
    assert without > 0 == none < some
    assert rows(made.run, TAKEN) == taken_by_the_oracle(made, range(1, 11))
    assert check(made.run).problems == []


TAKEN = "select step, slot, position, trajectory_id, prompt_id, branch from draws order by step, slot, position"


def taken_by_the_oracle(made: SyntheticRun, syncs: range) -> list[tuple]:
    """Return the draws that an oracle takes from the rows that SQL shows of the run."""
    sampling = made.config.sampling
    oracle = Oracle(
        seed=made.config.seed,
        slots=B,
        responses=K,
        recent_share=sampling.recent_share,
        inv_temp=sampling.inv_temp,
        capacity=sampling.capacity,
        evict=sampling.evict,
        copies=sampling.copies,
    )
    admitted = """
        select trajectory_id, prompt_id, content_hash, reward from trajectories where sync = {}
        order by searcher, seq, split_part(trajectory_id, '/', 3)::int
    """
    taken = []
    for sync in syncs:
        oracle.admit(sync - 1, [Row(*row) for row in rows(made.run, admitted.format(sync - 1))])
        for step in range((sync - 1) * EVERY + 1, sync * EVERY + 1):
            taken += [(step, *drawn[:5]) for drawn in oracle.draw(step)]
    return taken


def test_the_command_says_what_it_did(compacted: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    shards = sum(len(it.parts) for it in Compactions(compacted).look())
    assert cli.main(["compact", compacted.url]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{shards:,} shards of whole, admitted up to sync")
    assert "0 written now" in said
    assert "no tokens were given up" not in said
    run = copied(compacted, tmp_path)
    for said in ("trajectories were given up: retention", "no tokens were given up: all trajectories"):
        assert cli.main(["compact", run.url, "--drop-payloads"]) == 0
        assert said in capsys.readouterr().out
    assert cli.main(["compact", str(tmp_path / "none")]) == 2


def test_every_run_of_a_root_is_compacted_but_one_that_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("finished", "lives", "damaged"):
        (make_run if name == "finished" else make_live_run)(str(tmp_path), name)
    (tmp_path / "runs/damaged" / layout.RUN).write_text("{")
    dropped: dict[str, bool] = {}

    def note(run: Run, *, drop_payloads: bool) -> Compacted:
        dropped[run.name] = drop_payloads
        return compact_run(run, drop_payloads=drop_payloads)

    monkeypatch.setattr("flows.commands.compact.compact_run", note)
    monkeypatch.setattr("flows.commands.compact.has_all", lambda run: run.name == "finished")
    told: list[str] = []
    warned: list[str] = []
    failed = compact_all(str(tmp_path), drop_payloads=True, tell=told.append, warn=warned.append)
    assert failed == [f"{tmp_path}/runs/damaged"] and warned[0].startswith(failed[0])
    assert len(told) == 2 and list((tmp_path / "runs/finished" / layout.COMPACTIONS).iterdir())
    assert dropped == {"finished": True, "lives": False}
