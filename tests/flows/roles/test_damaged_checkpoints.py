"""A run with a damaged checkpoint goes on from an older one, and takes the same steps."""

import shutil
from pathlib import Path

import pytest
import torch

from benchmarks.harness.tiny_models import tiny_folder
from flows.commands import audit, fork
from flows.planning import create
from flows.roles import model_loading, wiring
from flows.roles.repeat_steps import restore_trainer
from storage import layout
from storage.maintenance.check import check
from storage.objects import manifest_folders
from storage.objects.open_store import open_store
from storage.runs.attempts import newest_attempt
from storage.runs.retention import given_up
from storage.runs.run import Run
from storage.weights.attempt_claim import claim_attempt
from storage.weights.checkpoints import Checkpoints
from tba.config import parse
from tba.errors import Damaged
from tba.types import Version
from tests.support.faults.checkpoint_damage import DAMAGES, damage
from tests.support.flows.live_roles import EVERY, STEPS, broken_off, learned, live, rows, run_all, settings
from tests.support.sampled_parameters import sampled


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    policy = tiny_folder(tmp_path_factory.mktemp("policy") / "tiny")
    run = create.start(settings(policy), str(tmp_path_factory.mktemp("root")), "whole")
    run_all(run)
    return run


def cut_short(finished: Run, root: Path) -> Run:
    """Return the run as if its trainer had died after record 6, with checkpoints 2 and 4."""
    return broken_off(finished, root, after_checkpoint=4, keep_records=6)


def resumes_with_the_same_steps(run: Run, finished: Run) -> bool:
    """Resume from checkpoint 2 on the existing records. Return True if draws, losses, gradient norms and weights are
    the same, bit for bit."""
    assert live(run, "trainer", wiring.run_trainer) == []
    again, whole = learned(run), learned(finished)
    assert [row[0] for row in again] == list(range(1, STEPS + 1))
    assert rows(run, "select continues_sync from attempts order by attempt desc limit 1") == [(2,)]
    return again == whole


def passed_over(run: Run) -> list[tuple[str, str, str]]:
    kind = "where kind = 'checkpoint-passed-over'"
    return rows(run, f"select data ->> 'checkpoint', severity, message from events {kind} order by created_at")


SAMPLE = ("flipped optimizer", "truncated manifest")


@pytest.mark.parametrize("how", sampled(DAMAGES, kept=SAMPLE))
def test_a_trainer_goes_on_exactly_from_an_older_checkpoint_where_the_newest_is_damaged(finished, tmp_path, how):
    run, newest = cut_short(finished, tmp_path), Version(4, 1)
    damage(run, newest, how)
    key, said = f"{layout.checkpoint(newest)}{DAMAGES[how][0]}", DAMAGES[how][2]
    assert any(it.key.startswith(layout.checkpoint(newest)) for it in check(run).problems)
    assert resumes_with_the_same_steps(run, finished)
    [(checkpoint, severity, message)] = passed_over(run)
    assert (checkpoint, severity) == (str(newest), "warning")
    assert f"checkpoint {newest} is damaged" in message and key in message and said in message
    assert check(run).ok  # having its own checkpoints, it gave up the damaged one, like others of abandoned attempts
    assert newest in given_up(run).checkpoints


def fill_store(run: Run, url: str) -> Run:
    """Copy a local run to another store."""
    store = open_store(url)
    for entry in run.store.list():
        store.create(entry.key, run.store.read(entry.key))
    return Run.open(url)


@pytest.mark.long
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("root", ["moto"], indirect=True)
def test_a_trainer_goes_on_exactly_past_a_damaged_checkpoint_in_an_object_store(finished, tmp_path, root):
    run = fill_store(cut_short(finished, tmp_path), layout.run_url(root, "whole"))
    damage(run, Version(4, 1), "flipped optimizer")
    assert resumes_with_the_same_steps(run, finished)
    [(checkpoint, _, message)] = passed_over(run)
    assert checkpoint == "000004-a0001" and f"{run.url}/checkpoints/000004-a0001/optimizer.safetensors" in message


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("state.json", b'{"step": 6, "sync": 3, "queues": {}}', "it is of sync 3 and step 6, not 4 and 8"),
        pytest.param(
            "state.json", b'{"step": 8, "sync": 4, "queues": []}', "queues is not a JSON object", marks=pytest.mark.long
        ),
        ("optimizer.safetensors", b"no tensors", "SafetensorError"),
        pytest.param("model.safetensors", b"no tensors", "SafetensorError", marks=pytest.mark.long),
        pytest.param("tokenizer.json", b"{", "JSONDecodeError", marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_that_was_saved_wrong_is_passed_over_too(finished, tmp_path, name, content, said):
    """The manifest matches, because the file was already wrong when it was stored."""
    run, newest = cut_short(finished, tmp_path), Version(4, 1)
    folder = tmp_path / "wrong"
    shutil.copytree(Checkpoints(run).load(*newest), folder)
    (folder / name).write_bytes(content)
    manifest_folders.remove(run.store, layout.checkpoint(newest))
    Checkpoints(run).save(*newest, 4 * EVERY, folder)
    assert resumes_with_the_same_steps(run, finished)
    [(_, _, message)] = passed_over(run)
    assert f"{name} is as it was saved, but no trainer can resume from it" in message and said in message


def test_a_trainer_without_an_intact_checkpoint_says_what_to_do_and_the_advice_works(finished, tmp_path):
    run = cut_short(finished, tmp_path)
    for checkpoint in Checkpoints(run).complete():
        damage(run, checkpoint)
    (error,) = live(run, "trainer", wiring.run_trainer)
    assert isinstance(error, Damaged) and "no checkpoint is intact (000004-a0001: " in str(error)
    assert "restore the file that is named and resume" in str(error) and "`tba fork whole --step 8`" in str(error)
    assert newest_attempt(run) == 1
    forked = fork.fork(run, 8, {"training.steps": str(7 * EVERY)}, name="saved")
    assert forked.parent and forked.parent.rebuilt
    policy, state = model_loading.load_checkpoint(forked, parse(forked.config), Version(4, 1))
    whole, whole_state = model_loading.load_checkpoint(finished, parse(finished.config), Version(4, 1))
    assert policy.snapshot().sha256 == whole.snapshot().sha256
    assert state.queues == whole_state.queues and torch.equal(state.random, whole_state.random)
    assert all(torch.equal(it, whole_state.optimizer[name]) for name, it in state.optimizer.items())


@pytest.mark.parametrize("how", ["flipped model", "truncated manifest"])
def test_an_audit_and_a_fork_take_the_steps_since_an_older_checkpoint_where_one_is_damaged(finished, tmp_path, how):
    run = cut_short(finished, tmp_path)
    damage(run, Version(4, 1), how)
    forked = fork.fork(run, 8, {"training.steps": "10"}, name="fork")
    assert forked.parent and forked.parent.rebuilt
    assert Checkpoints(forked).load(4, 1)
    damage(run, Version(2, 1), how)
    found = audit.audit(run, 7)
    assert found.ok and found.began_after == 0


def test_a_fork_falls_back_to_its_start_and_says_what_to_do_where_that_is_damaged(finished, tmp_path):
    run = cut_short(finished, tmp_path)
    forked = fork.fork(run, 4, {}, name="fork", replay=True)
    assert live(forked, "trainer", wiring.run_trainer) == []
    own = [it for it in Checkpoints(forked).complete() if it.number > 2]
    assert own
    for checkpoint in own:
        damage(forked, checkpoint)
    assert claim_attempt(forked).continues == Version(2, 1)
    damage(run, Version(2, 1))
    with pytest.raises(Damaged, match=r"fork its parent again: `tba fork whole --step 4 --replay`"):
        claim_attempt(forked)
    with pytest.raises(Damaged, match=r"no checkpoint is intact .*`tba fork whole --step 4 --replay`"):
        restore_trainer(forked, 9)
