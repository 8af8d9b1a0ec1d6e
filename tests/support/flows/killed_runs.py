"""Runs whose roles are processes that a test kills."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import storage
from benchmarks.harness.tiny_models import tiny_folder
from flows.planning import create
from flows.roles.role import main
from storage import layout
from storage.runs.control import change_state
from storage.runs.run import Run
from tests.support.flows.live_roles import settings
from tests.support.waiting import until

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["flows.roles.wiring", "transformers.models.llama.modeling_llama", __name__])


class RoleProcess:
    """A role in a process and a session of its own. It is forked from a process that has loaded the libraries, which
    takes longer than what most tests let a role do."""

    def __init__(self, arguments: Sequence[str], *, output: str = os.devnull):
        self._process = _FORKS.Process(target=_live, args=(arguments, dict(os.environ), output))
        self._process.start()
        assert self._process.pid
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float) -> int:
        self._process.join(seconds)
        assert self._process.exitcode is not None, f"still at work after {seconds:g} s"
        return self._process.exitcode


def _live(arguments: Sequence[str], environment: Mapping[str, str], output: str) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    with open(output, "w") as written:
        os.dup2(written.fileno(), 1)
        os.dup2(written.fileno(), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main([*arguments]))


def rows(run: Run, query: str) -> list[tuple]:
    with storage.connect(run) as con:
        return con.execute(query).fetchall()


def role(run: Run, *arguments: str) -> RoleProcess:
    return RoleProcess([*arguments, "--run", run.url])


def kill(process: RoleProcess) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it has no session of its own yet, or has ended
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
    process.wait(20)


def stored(run: Run, prefix: str) -> int:
    return len(run.store.list(prefix))


def run_with_kills(root: Path, steps: int) -> Run:
    """Run a searcher and a trainer until the trainer has taken all steps. The trainer is killed twice at work, and the
    searcher once."""
    policy = tiny_folder(root / "policy")
    config = settings(policy, **{"training.steps": steps, "sync.checkpoint_every": 3, "sync.keep_checkpoints": 2})
    run = create.start(config, str(root), "whole")
    searcher, trainer = role(run, "searcher"), role(run, "trainer")
    try:
        until(lambda: stored(run, layout.STEPS) >= 2, "two syncs")
        kill(searcher)
        kill(trainer)
        searcher, trainer = role(run, "searcher"), role(run, "trainer")
        until(lambda: stored(run, layout.SYNCS) >= 7, "seven records")
        kill(trainer)
        trainer = role(run, "trainer")
        assert trainer.wait(120) == 0
        change_state(run, desired="stop", why="finished")
        assert searcher.wait(60) == 4
    finally:
        for process in (searcher, trainer):
            if process.poll() is None:
                kill(process)
    return run
