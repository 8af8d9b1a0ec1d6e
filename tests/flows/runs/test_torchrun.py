"""Ranks that something else starts: torchrun, or a person who sets the variables of torchrun's contract. Searchers and
trainer go in step, so timing has no influence on what is learned."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from benchmarks.harness.step_queries import DRAWS, LEDGER
from benchmarks.harness.tiny_models import tiny_folder
from flows.cli import main
from flows.planning import create
from flows.roles import leading_rank
from flows.supervision.processes import STOPPED
from storage import layout
from storage.maintenance.check import check
from storage.objects.open_store import open_store
from storage.runs.control import change_state, read_state
from storage.runs.leases import read_lease
from storage.runs.rendezvous import find_rendezvous
from storage.runs.run import Run
from storage.weights.checkpoints import Checkpoints
from tba.types import Version
from tests.support.flows.killed_runs import kill, role, rows, stored
from tests.support.flows.live_roles import IN_STEP, check_nearly_same_steps, settings
from tests.support.flows.roles import TINY, end_roles
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("policy") / "tiny")


@pytest.fixture(scope="module")
def automatic(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose trainer has started its second rank itself."""
    run = start(tmp_path_factory.mktemp("root"), policy, "automatic")
    searcher, trainer = role(run, "searcher"), role(run, "trainer")
    try:
        assert trainer.wait(200) == 0
    finally:
        kill(trainer)
        kill(searcher)
    return run


def start(root: Path, policy: Path, name: str, **more: object) -> Run:
    changes = {**IN_STEP, "training.ranks": 2, **more}
    return create.start(settings(policy, **changes), str(root), name)


def torchrun(run: Run, ranks: int, log: Path) -> "subprocess.Popen[bytes]":
    options = [f"--nproc-per-node={ranks}", "--max-restarts=0", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, f"--rdzv-id={run.name}-1"]
    with log.open("ab") as output:
        return subprocess.Popen(
            [*command, "-m", "flows.roles.rank", run.url], stdout=output, stderr=output, start_new_session=True
        )


def by_hand(run: Run, ranks: int, log: Path, **more: int) -> "list[subprocess.Popen[bytes]]":
    """Start ranks of which only rank 0 is told an address. The others learn it from the run's storage."""
    processes = list[subprocess.Popen[bytes]]()
    for rank in reversed(range(ranks)):
        said = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks, **more}
        environment = {**os.environ, **{name: str(value) for name, value in said.items()}}
        if rank == 0:
            environment["MASTER_ADDR"] = "127.0.0.1"
        with log.open("ab") as output:
            command = [*leading_rank.COMMAND, run.url]
            processes.append(subprocess.Popen(command, stdout=output, stderr=output, env=environment))
    return processes


def end(processes: "Sequence[subprocess.Popen[bytes]]") -> None:
    for process in processes:
        for it in [*psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []:
            it.kill()
        process.kill()
        process.wait(20)


def test_torchrun_takes_the_steps_of_a_trainer_that_starts_its_ranks(automatic: Run, policy: Path, tmp_path: Path):
    run, log = start(tmp_path, policy, "torchrun"), tmp_path / "log"
    searcher, trainer = role(run, "searcher"), torchrun(run, 2, log)
    try:
        assert trainer.wait(300) == 0, log.read_text()[-3000:]
    finally:
        end([trainer])
        kill(searcher)
    assert rows(run, LEDGER) == rows(automatic, LEDGER)
    assert rows(run, DRAWS) == rows(automatic, DRAWS)
    assert check(run).problems == []


def test_an_attempt_that_has_lost_a_rank_is_continued_by_another_number_of_ranks(
    automatic: Run, policy: Path, tmp_path: Path
):
    run, log = start(tmp_path, policy, "killed"), tmp_path / "log"
    searcher, begun = role(run, "searcher"), by_hand(run, 2, log)
    try:
        until(lambda: stored(run, layout.STEPS) >= 3, "three syncs", 200, log=log)
        begun[0].send_signal(signal.SIGKILL)
        assert begun[1].wait(120) == 1, log.read_text()[-3000:]
        begun += by_hand(run, 3, log)
        assert [it.wait(300) for it in begun[2:]] == [0, 0, 0], log.read_text()[-3000:]
    finally:
        end(begun)
        change_state(run, desired="stop", why="finished")
        kill(searcher)
    (failed,) = rows(run, "select message from events where kind = 'failed'")
    assert re.match(rf"RunFailed: rank 1 of the trainer \(pid {begun[0].pid} on \S+\) has given no sign", failed[0])
    assert [it.size for n in (1, 2) if (it := find_rendezvous(run, n))] == [2, 3]
    check_nearly_same_steps(run, automatic)
    assert check(run).problems == []


def tba(*arguments: str, log: Path) -> "subprocess.Popen[bytes]":
    with log.open("ab") as output:
        command = [sys.executable, "-m", "flows.cli", *arguments]
        return subprocess.Popen(command, stdout=output, stderr=output)


def node(run: Run, ranks: int, log: Path) -> "subprocess.Popen[bytes]":
    with log.open("ab") as output:
        command = [sys.executable, "-m", "flows.roles.node", run.url, f"--ranks={ranks}"]
        return subprocess.Popen(command, stdout=output, stderr=output)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(it, marks=pytest.mark.long) for it in (signal.SIGINT, signal.SIGKILL))]
)
def test_the_ranks_of_a_machine_end_with_the_process_that_has_started_them(policy: Path, tmp_path: Path, number):
    """Only that process gets the signal. Rank 0 waits for its first trajectories."""
    run, log = start(tmp_path, policy, "r"), tmp_path / "log"
    started = node(run, 2, log)
    try:
        until(lambda: "compute-dtype-chosen" in log.read_text(), "rank 0 has begun", 100, log=log)
        ranks = psutil.Process(started.pid).children()
        started.send_signal(number)
        assert started.wait(100) == (-9 if number == signal.SIGKILL else STOPPED), log.read_text()[-3000:]
        assert not psutil.wait_procs(ranks, 60)[1]
    finally:
        end([started])
    assert len(ranks) == 2
    stopped = read_lease(run, "trainer")
    assert stopped and (stopped.status == "stopped") == (number != signal.SIGKILL)


@pytest.mark.long
def test_a_supervised_run_gets_more_searchers_and_after_a_stop_more_ranks(policy: Path, tmp_path: Path):
    """The trainer waits for fresh trajectories, so it takes a minute for all steps, and is asked to stop before."""
    steps, log = 250, tmp_path / "log"
    url = layout.run_url(str(tmp_path), "r")
    changes = {"model.path": policy, **TINY, "search.searchers": 1, "sampling.max_age": 3}
    given = [f"{name}={value}" for name, value in changes.items()]
    begin = ["run", "quickstart", "--root", str(tmp_path), "--name", "r", "--steps", str(steps)]
    supervisor = tba(*begin, "--external-trainer", "--set", *given, log=log)
    begun = [supervisor]
    try:
        until(lambda: open_store(url).exists(layout.RUN) or supervisor.poll(), "there is a run", log=log)
        run = Run.open(url)
        begun.append(torchrun(run, 2, log))
        until(lambda: stored(run, layout.STEPS) >= 2, "two syncs", 200, log=log)
        assert main(["scale", url, "--searchers", "2"]) == 0
        appended = layout.searcher_folder(1)
        until(lambda: stored(run, appended) or supervisor.poll() is not None, "the second appends", 100, log=log)
        assert main(["stop", url]) == 0
        assert supervisor.wait(100) != 0, log.read_text()[-3000:]
        begun[1].wait(60)
        stopped = read_lease(run, "trainer")
        assert stopped and stopped.status == "stopped", log.read_text()[-3000:]

        begun.append(tba("resume", url, "--external-trainer", log=log))
        until(lambda: read_state(run).desired == "run", "the run is resumed", log=log)
        begun.append(node(run, 3, log))
        assert [it.wait(300) for it in begun[2:]] == [0, 0], log.read_text()[-3000:]
    finally:
        end(begun)
        if open_store(url).exists(layout.RUN):
            end_roles(Run.open(url))
    assert [it.size for n in (1, 2) if (it := find_rendezvous(run, n))] == [2, 3]
    taken = rows(run, "select attempt, min(step), max(step) from steps_all group by all order by all")
    (_, begins, last), (_, goes_on, ends) = taken
    assert (begins, ends) == (1, steps) and 1 < goes_on <= last + 1
    assert rows(run, "select count(distinct searcher) from trajectories") == [(2,)]
    assert check(run).problems == []


@pytest.mark.long
def test_adapters_and_a_value_model_train_with_ranks_as_without(policy: Path, tmp_path: Path):
    """The run with ranks loses one of them, and is continued by a single process."""
    changes = {"model.lora_rank": 2, "training.learning_rate": 1e-2, "objective.name": "ppo"}
    alone, run = (start(tmp_path, policy, name, **changes) for name in ("alone", "ranks"))
    searcher, log = role(alone, "searcher"), tmp_path / "log"
    begun = by_hand(alone, 1, log)
    try:
        assert begun[0].wait(200) == 0, log.read_text()[-3000:]
        kill(searcher)
        searcher = role(run, "searcher")
        begun += by_hand(run, 2, log)
        until(lambda: stored(run, layout.STEPS) >= 3, "three syncs", 200, log=log)
        begun[1].send_signal(signal.SIGKILL)
        assert begun[2].wait(120) == 1, log.read_text()[-3000:]
        assert (Checkpoints(run).newest() or Version(0, 0)).number >= 2
        begun += by_hand(run, 1, log)
        assert begun[3].wait(300) == 0, log.read_text()[-3000:]
    finally:
        end(begun)
        change_state(run, desired="stop", why="finished")
        kill(searcher)
    check_nearly_same_steps(run, alone)
    assert check(run).problems == []


def test_ranks_of_a_machine_must_follow_one_another_to_share_a_copy_of_the_weights(policy: Path, tmp_path: Path):
    run, log = start(tmp_path, policy, "apart", **{"training.copy_per": "node"}), tmp_path / "log"
    (trainer,) = by_hand(run, 1, log, WORLD_SIZE=3, LOCAL_WORLD_SIZE=2)
    try:
        assert trainer.wait(100) == 2
    finally:
        end([trainer])
    assert "LOCAL_WORLD_SIZE must divide WORLD_SIZE (3) where training.copy_per is 'node'" in log.read_text()
