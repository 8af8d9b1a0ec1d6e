"""Whole roles on real storage: a trainer, a searcher and an evaluator side by side, with a tiny random policy."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import storage
from flows import plan, wiring
from storage import layout
from storage.attempts import claim_attempt
from storage.check import check
from storage.checkpoints import Checkpoints
from storage.control import change_state
from storage.evaluations import Evaluations
from storage.events import Events
from storage.leases import HeldLease
from storage.run import Run
from storage.trajectories import Trajectories
from storage.versions import Versions
from tba.config import Config
from tba.errors import DeadlinePassed, Stopped, Superseded
from tba.types import Version
from tests.tba.test_tasks_gsm8k import data_folder
from tests.tba.tiny import tiny_folder

STEPS, EVERY = 12, 2


SMALL = {
    "training.steps": STEPS,
    "training.prompts_per_step": 4,
    "training.groups_per_micro_batch": 2,
    "training.learning_rate": 1e-3,
    "search.prompts_per_round": 8,
    "search.initial_fill": 64,
    "sync.every": EVERY,
    "sync.checkpoint_every": 2,
    "sync.keep_checkpoints": 99,
    "evaluation.every": 3,
    "evaluation.prompts": 8,
    "evaluation.samples": 1,
}


def settings(policy: Path, **changes: object) -> Config:
    return plan.resolve("quickstart", {"model.path": str(policy), **SMALL, **changes})


def live(run: Run, name: str, role: Callable[..., None], *arguments: int) -> list[BaseException]:
    """One life of a role in this thread; what ended it."""
    with HeldLease(run, name, every=0.2) as lease:
        try:
            role(run, *arguments, lease, Events(run, name, lease.life))
        except BaseException as error:
            return [error]
    return []


def until(thread: threading.Thread, done: Callable[[], bool]) -> None:
    while thread.is_alive() and not done():
        time.sleep(0.05)


def run_all(run: Run) -> None:
    """Every role until the evaluator has scored the last version."""
    ended: dict[str, list[BaseException]] = {}
    roles = {
        "trainer": (wiring.run_trainer,),
        "evaluator": (wiring.run_evaluator,),
        "searcher-000": (wiring.run_searcher, 0),
    }
    threads = {
        name: threading.Thread(target=lambda name=name: ended.update({name: live(run, name, *roles[name])}))
        for name in roles
    }
    # One after the other: transformers loads models through a state that all threads of a process share.
    threads["trainer"].start()
    until(threads["trainer"], lambda: Versions(run).reference() is not None)
    threads["searcher-000"].start()
    until(threads["searcher-000"], lambda: Trajectories(run).next_round(0) > 0)
    threads["evaluator"].start()
    threads["trainer"].join()
    if ended["trainer"]:
        change_state(run, desired="stop", why="the trainer failed")
    threads["evaluator"].join()
    change_state(run, desired="stop", why="finished")
    threads["searcher-000"].join()
    assert (ended["trainer"], ended["evaluator"]) == ([], [])
    assert [type(error) for error in ended["searcher-000"]] == [Stopped]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("policy") / "tiny")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, policy: Path) -> Iterator[Run]:
    run = plan.start(settings(policy), str(tmp_path_factory.mktemp("root")), "whole")
    run_all(run)
    yield run


def rows(run: Run, query: str) -> list[tuple]:
    with storage.connect(run) as con:
        return con.execute(query).fetchall()


def test_a_run_ends_with_every_step_in_the_ledger_and_nothing_missing_or_doubled(finished):
    assert rows(finished, "select step, sync from steps order by step") == [
        (step, (step + 1) // EVERY) for step in range(1, STEPS + 1)
    ]
    assert rows(finished, "select count(*), count(distinct (step, slot, position)) from draws") == [
        (STEPS * 4 * 8, STEPS * 4 * 8)
    ]
    assert check(finished).ok


def test_every_step_joins_to_its_trajectories_their_versions_and_what_was_found(finished):
    joined = rows(
        finished,
        "select count(*) from draws d join trajectories t using (trajectory_id) join steps s on s.step = d.step "
        "where t.step < d.step and d.age = d.step - 1 - t.version_start * 2",
    )
    assert joined == [(STEPS * 4 * 8,)]


def test_the_loss_of_a_step_is_the_mean_of_its_squared_residuals(finished):
    pairs = rows(
        finished, "select any_value(loss), avg(residual ** 2) from draws join steps using (step) group by step"
    )
    assert len(pairs) == STEPS
    for loss, mean in pairs:
        assert loss == pytest.approx(mean, rel=1e-5)


def test_a_residual_follows_from_the_stored_reward_and_log_probabilities(finished):
    """log Z + log pi - log pi_ref - r / beta, from columns alone."""
    worst = rows(
        finished,
        "select max(abs(residual - (d.log_z + logp - ref_logp - reward / beta))) "
        "from draws d join trajectories using (trajectory_id) join steps s on s.step = d.step",
    )
    assert worst[0][0] < 1e-3


def test_the_stored_reference_log_probabilities_are_the_ones_that_were_used(finished):
    worst = rows(
        finished,
        "select max(abs(ref_logp - list_sum(ref_logps))) from draws join trajectories using (trajectory_id)",
    )
    assert worst[0][0] < 1e-3


def test_on_the_first_version_the_policy_is_the_reference(finished):
    """At step 1 nothing has been learned: log pi = log pi_ref = what the generator recorded."""
    worst = rows(
        finished,
        "select max(abs(logp - ref_logp)), max(abs(ref_logp - list_sum(behaviour_logps))) "
        "from draws d join trajectories using (trajectory_id) where d.step = 1",
    )
    assert max(worst[0]) < 1e-3


def test_the_first_and_the_last_version_are_scored(finished):
    scored = {version.number for version in Evaluations(finished).done()}
    assert {0, STEPS // EVERY} <= scored


def test_a_later_searcher_generates_with_a_later_version(finished):
    assert rows(finished, "select max(version_start) > 0 from trajectories") == [(True,)]


def broken_off(finished: Run, root: Path, *, after_checkpoint: int, keep_records: int) -> Run:
    """A copy of the run as a trainer would have left it that died after writing record `keep_records`, when its
    newest checkpoint was `after_checkpoint`."""
    shutil.copytree(Path(finished.url), root / "runs" / "whole")
    run = Run.open(str(root / "runs" / "whole"))
    for entry in run.store.list():
        name = entry.key.partition("/")[2]
        number = int(name[:6]) if name[:6].isdecimal() else -1
        late = {
            layout.SYNCS: number > keep_records,
            layout.DRAWS: number > after_checkpoint,
            layout.STEPS: number > after_checkpoint,
            layout.CHECKPOINTS: number > after_checkpoint,
        }
        if late.get(f"{entry.key.partition('/')[0]}/"):
            run.store.delete(entry.key)
    change_state(run, desired="run", why="resumed")
    return run


def learned(run: Run) -> list[tuple]:
    return rows(
        run,
        "select s.step, loss, grad_norm, weights_sha256, md5(string_agg(trajectory_id || branch || age || residual, "
        "',' order by slot, position)) from steps s join draws d using (step) group by all order by 1",
    )


@pytest.mark.parametrize(("checkpoint", "records"), [(2, 4), (4, 6), (0, 3)])
def test_a_resumed_trainer_takes_the_same_steps_on_the_same_trajectories(finished, tmp_path, checkpoint, records):
    """Bit for bit, where the records exist: draws, losses, gradient norms, and the weights after every sync."""
    run = broken_off(finished, tmp_path, after_checkpoint=checkpoint, keep_records=records)
    assert live(run, "trainer", wiring.run_trainer) == []
    whole, again = learned(finished), learned(run)
    replayed = min((records + 1) * EVERY, STEPS)
    assert [row[0] for row in again] == list(range(1, STEPS + 1))
    assert again[:replayed] == whole[:replayed]
    assert check(run).ok


def test_a_trainer_that_is_asked_to_stop_leaves_a_checkpoint_and_no_lost_step(finished, tmp_path):
    run = broken_off(finished, tmp_path, after_checkpoint=0, keep_records=6)
    change_state(run, desired="stop", why="enough")
    ended = live(run, "trainer", wiring.run_trainer)
    assert [type(error) for error in ended] == [Stopped]
    newest = Checkpoints(run).newest()
    taken = rows(run, "select max(step) from steps")[0][0]
    assert newest is not None and taken == newest.number * EVERY < STEPS


def test_a_superseded_trainer_stops_without_writing_a_record(finished, tmp_path):
    run = broken_off(finished, tmp_path, after_checkpoint=2, keep_records=2)
    original = claim_attempt(run)
    buffer = wiring._buffer(run, Config(), original.number, Events(run, "trainer", 9))
    for sync in range(3):
        buffer.sync(sync, step=sync * EVERY)
    claim_attempt(run)
    with pytest.raises(Superseded):
        buffer.sync(3, step=3 * EVERY)
    assert not run.store.exists(layout.sync(3))


def test_without_searchers_the_initial_fill_has_a_deadline(policy, tmp_path):
    config = settings(policy, **{"limits.data_deadline": 1.0})
    run = plan.start(config, str(tmp_path), "lonely")
    (error,) = live(run, "trainer", wiring.run_trainer)
    assert isinstance(error, DeadlinePassed) and "0 of 64 trajectories" in str(error)
    assert run.store.exists(layout.version(Version(0, 1)) + layout.MANIFEST)


def test_gsm8k_runs_on_the_original_data_with_a_rule_and_a_template_of_choice(policy, tmp_path):
    folder = data_folder()
    changes = {
        "task.train": str(folder / "train.jsonl"),
        "task.test": str(folder / "test.jsonl"),
        "task.rule": "strict-hashes",
        "task.template": "vineppo",
        "model.publish_dtype": "float32",
        "search.searchers": 1,
        "search.max_response_tokens": 8,
        "training.responses_per_prompt": 8,
        "search.responses_per_prompt": 8,
        "training.steps": 4,
    }
    small = {key: value for key, value in SMALL.items() if key not in changes}
    run = plan.start(plan.resolve("gsm8k", {"model.path": str(policy), **small, **changes}), str(tmp_path), "gsm8k")
    run_all(run)
    assert check(run).ok
    assert rows(run, "select split, count(*) > 1000 from prompts group by 1 order by 1") == [
        ("test", True),
        ("train", True),
    ]
    assert rows(run, "select bool_and(prompt like '[MATH_TASK] Problem:%Solution:') from trajectories") == [(True,)]
