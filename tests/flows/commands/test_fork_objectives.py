"""The long tests of exact resume, audit and forks: objectives that keep more state than the policy, on the steps of a
run whose roles are killed."""

from dataclasses import replace

import pytest

from benchmarks.harness.step_queries import DRAWS, LEDGER
from flows.commands import audit, fork
from flows.roles import wiring
from storage import layout
from storage.maintenance.check import check
from storage.runs.run import Run
from tba.config import parse
from tba.train import learner
from tba.train.schedules import learning_rate_at
from tests.support.flows.killed_runs import kill, role, rows, run_with_kills, stored
from tests.support.flows.live_roles import live
from tests.support.waiting import until

STEPS = 24


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a finished run of real processes, whose trainer was killed twice at work, and whose searcher once."""
    return run_with_kills(tmp_path_factory.mktemp("root"), STEPS)


@pytest.mark.long
@pytest.mark.slow
def test_a_replay_with_another_objective_and_a_reference_that_moves_resumes_and_is_audited(killed: Run):
    """The rewards teach nothing here. Weight decay moves the policy away from the reference, and GRPO moves it back."""
    changes = {
        "objective.name": "grpo", "objective.reference_reset": "5", "objective.reset_optimizer": "true",
        "training.weight_decay": "1", "training.learning_rate": "0.01",
    }  # fmt: skip
    run, whole = (fork.fork(killed, 0, changes, name=name, replay=True) for name in ("grpo", "grpo-whole"))
    trainer = role(run, "trainer")
    try:
        until(lambda: stored(run, layout.CHECKPOINTS) and stored(run, layout.SYNCS) >= 9, "a checkpoint, and more")
    finally:
        kill(trainer)
    for it in (run, whole):
        assert live(it, "trainer", wiring.run_trainer) == []
    attempts, unbroken_attempts = (rows(it, "select max(attempt) from attempts")[0][0] for it in (run, whole))
    assert attempts == unbroken_attempts + 1
    config = parse(run.config)
    assert rows(run, LEDGER) == rows(whole, LEDGER) and rows(run, DRAWS) == rows(whole, DRAWS)
    counts = rows(run, "select count(advantage), count(residual), count(log_z) from draws")
    assert counts == [(STEPS * config.batch, 0, 0)]
    assert rows(run, "select count(*) from steps where ratio_mean > 0 and k3 >= 0") == [(STEPS,)]
    away = dict(rows(run, "select step, max(abs(logp - ref_logp)) from draws group by step"))
    after_resets = max(away[step] for step in (6, 11, 16, 21))
    assert after_resets == pytest.approx(0, abs=1e-5)
    assert min(away[step] for step in (10, 15, 20)) > 2 * after_resets
    for step in (9, 14, STEPS):
        found = audit.audit(run, step)
        assert found.ok and found.tolerance == 0.0
    assert check(run).problems == []


@pytest.mark.long
@pytest.mark.slow
def test_steps_that_are_skipped_as_the_reference_is_reset_are_audited_and_gone_on_from(
    killed: Run, monkeypatch: pytest.MonkeyPatch
):
    """The reference is reset all the same, and the optimizer begins anew with the next step that is not skipped."""
    skipped, beta_at = [6, 7, 11], learner.beta_at
    monkeypatch.setattr(learner, "beta_at", lambda step, of: 1e-300 if step in skipped else beta_at(step, of))
    changes = {
        "objective.reference_reset": "5", "objective.reset_optimizer": "true", "sync.checkpoint_every": "3",
        "sync.keep_checkpoints": "9", "training.weight_decay": "1", "training.learning_rate": "0.01",
    }  # fmt: skip
    run = fork.fork(killed, 0, changes, name="skipping", replay=True)
    assert live(run, "trainer", wiring.run_trainer) == []
    assert rows(run, "select step from steps where skipped = 1 order by step") == [(step,) for step in skipped]
    assert rows(run, "select step from steps where loss is null order by step") == [(step,) for step in skipped]
    away = dict(rows(run, "select step, max(abs(logp - ref_logp)) from draws group by step"))
    assert max(away[step] for step in (6, 7, 8, 11, 12)) < 1e-4 < min(away[step] for step in (10, 15, 20))
    found = [audit.audit(run, step) for step in (6, 8, 11, STEPS)]
    assert all(it.ok and it.tolerance == 0.0 for it in found)
    assert [it.began_after for it in found] == [0, 6, 6, 18]
    broken = fork.fork(killed, 0, changes, name="skipping-broken", replay=True)
    monkeypatch.setattr(learner, "learning_rate_at", lambda step, of: learning_rate_at(step, of) + 0 / (step - 9))
    assert [str(error) for error in live(broken, "trainer", wiring.run_trainer)] == ["division by zero"]
    monkeypatch.setattr(learner, "learning_rate_at", learning_rate_at)
    assert live(broken, "trainer", wiring.run_trainer) == []
    assert rows(broken, LEDGER) == rows(run, LEDGER) and rows(broken, DRAWS) == rows(run, DRAWS)
    assert check(run).problems == check(broken).problems == []


@pytest.mark.long
@pytest.mark.slow
def test_a_learned_log_z_goes_on_from_the_checkpoint_in_a_resumed_run_an_audit_and_a_fork(killed: Run):
    """A fork begins it at step 18 and generates further. Its trainer is killed once it has a checkpoint of its own."""
    changes = {
        "objective.log_z": "learned", "objective.log_z_learning_rate": "0.05", "training.steps": "42",
        "sync.checkpoint_every": "3", "sync.keep_checkpoints": "9",
    }  # fmt: skip
    run = fork.fork(killed, 18, changes, name="learned")
    own = replace(run, store=run.own)
    searcher, trainer = role(run, "searcher"), role(run, "trainer")
    try:
        until(lambda: stored(own, layout.CHECKPOINTS) and stored(own, layout.STEPS) >= 4, "a checkpoint, and more")
        kill(trainer)
        assert live(run, "trainer", wiring.run_trainer) == []
    finally:
        for process in (searcher, trainer):
            if process.poll() is None:
                kill(process)
    [(first, last)] = rows(run, "select min(attempt), max(attempt) from attempts where attempt > 3")
    assert last == first + 1
    log_z = dict(rows(run, "select step, max(abs(log_z)) from draws where step > 18 group by step"))
    assert log_z[19] == 0 and all(log_z[step] != 0 for step in range(20, 43)), "it has begun again from nothing"
    for name, step in (("learned-whole", 18), ("learned-later", 30)):
        again = fork.fork(run, step, {}, name=name, replay=True)
        assert live(again, "trainer", wiring.run_trainer) == []
        assert rows(again, LEDGER) == rows(run, LEDGER) and rows(again, DRAWS) == rows(run, DRAWS)
        assert check(again).problems == []
    for step, began_after in ((20, 18), (32, 30)):
        found = audit.audit(run, step)
        assert found.ok and found.tolerance == 0.0
        assert found.began_after == began_after
    assert check(run).problems == []
