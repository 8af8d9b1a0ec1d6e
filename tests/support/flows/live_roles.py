"""Runs whose roles are threads in the process of a test."""

import math
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import storage
from flows.planning import create, resolve
from flows.roles import wiring
from storage import layout
from storage.log.trajectories import Trajectories
from storage.objects.open_store import open_store
from storage.runs.control import change_state
from storage.runs.events import Events
from storage.runs.held_lease import HeldLease
from storage.runs.run import Run
from storage.weights.versions import Versions
from tba.config import Config
from tba.errors import Stopped
from tba.tasks.quickstart import Quickstart
from tba.types import Prompt, Response, Reward
from tests.support.waiting import until

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
    "evaluation.samples": 2,
    "evaluation.temperature": 0.35,
    "evaluation.top_p": 0.9,
    "evaluation.pass_at": [1, 2],
    "evaluation.solved_at": 0.0,
    # No setting has a value at which a role that ignores the setting would do the same.
    "search.temperature": 0.7,
    "search.top_p": 0.95,
    "objective.include_eos": False,
    "objective.beta_start": 0.2,
    "objective.beta_end": 0.1,
    "objective.beta_target": STEPS,
    "objective.beta_stop": STEPS,
    "training.clip_norm": 5.0,
}


IN_STEP = {
    "training.steps": 6,
    "training.groups_per_micro_batch": 1,
    "sync.lag": 0,
    "sync.every": 1,
    "sync.checkpoint_every": 2,
    "sampling.recent_share": 1.0,
    "search.prompts_per_round": 4,
    "training.weight_decay": 0.5,  # so that versions differ, whatever the rewards are
}
"""Settings with which searchers and trainer go in step, so timing has no influence on what is learned."""
LOSSES = "select step, loss, grad_norm from steps order by step"
CHOSEN = "select step, slot, position, trajectory_id, branch, weight, age from draws order by step, slot, position"


class OddTokens(Quickstart):
    """A task whose rewards differ from the first step on, even if the policy is random. Without rewards a loss is
    hardly more than rounding."""

    def reward(self, prompt: Prompt, response: Response) -> Reward:
        return Reward(value=sum(token % 2 for token in response.tokens) / len(response.tokens))


def settings(policy: Path, **changes: object) -> Config:
    return resolve.resolve("quickstart", {"model.path": str(policy), **SMALL, **changes})


def live(run: Run, name: str, role: Callable[..., None], *arguments: int) -> list[BaseException]:
    """Run one life of a role in this thread, and return the exception that ended it, if any."""
    with HeldLease(run, name, every=0.2) as lease:
        try:
            role(run, *arguments, lease, Events(run, name, lease.life))
        except BaseException as error:
            return [error]
    return []


def ended_at_once(config: Config, root: object) -> BaseException:
    """Start a run that its trainer refuses, and return the exception that ended the trainer."""
    (error,) = live(create.start(config, str(root), "refused"), "trainer", wiring.run_trainer)
    return error


def run_all(run: Run) -> None:
    """Run all roles until the evaluator has scored the last version."""
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
    # Roles start one after the other: transformers loads models through state that all threads of a process share.
    threads["trainer"].start()
    until(lambda: not threads["trainer"].is_alive() or Versions(run).reference() is not None, within=math.inf)
    threads["searcher-000"].start()
    until(lambda: not threads["searcher-000"].is_alive() or Trajectories(run).next_seq(0) > 0, within=math.inf)
    threads["evaluator"].start()
    threads["trainer"].join()
    if ended["trainer"]:
        change_state(run, desired="stop", why="the trainer failed")
    threads["evaluator"].join()
    change_state(run, desired="stop", why="finished")
    threads["searcher-000"].join()
    assert (ended["trainer"], ended["evaluator"]) == ([], [])
    assert [type(error) for error in ended["searcher-000"]] == [Stopped]


def rows(run: Run, query: str) -> list[tuple]:
    with storage.connect(run) as con:
        return con.execute(query).fetchall()


def check_nearly_same_steps(run: Run, other: Run) -> None:
    """Check that two runs drew the same trajectories, and that their losses differ by rounding alone: a sum over
    another number of ranks is rounded otherwise."""
    assert rows(run, CHOSEN) == rows(other, CHOSEN)
    for found, expected in zip(rows(run, LOSSES), rows(other, LOSSES), strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


def broken_off(finished: Run, root: Path, *, after_checkpoint: int, keep_records: int) -> Run:
    """Copy a run as if its trainer had died after record `keep_records`, with `after_checkpoint` as the newest
    checkpoint."""
    shutil.copytree(Path(finished.url), root / "runs" / "whole")
    run = Run.open(str(root / "runs" / "whole"))
    for entry in run.store.list():
        name = entry.key.partition("/")[2]
        number = int(name[:6]) if name[:6].isdecimal() else -1
        late = {
            layout.SYNCS: number > keep_records,
            layout.DRAWS: number > after_checkpoint,
            layout.STEPS: number > after_checkpoint,
            layout.LEDGER: number > after_checkpoint,
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


def upload(folder: Path, url: str, *names: str) -> None:
    store = open_store(url)
    for path in folder.iterdir():
        if not names or path.name in names:
            store.upload(path, path.name)
