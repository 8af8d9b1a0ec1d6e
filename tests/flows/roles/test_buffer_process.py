"""A replay buffer in another process behaves like the replay buffer itself."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.harness.fetched import fetched_of
from flows.planning import create
from flows.roles.buffer_process import BufferProcess, make_buffer
from storage import layout
from storage.log.schema import decode
from storage.log.trajectories import Trajectories
from storage.objects.open_store import open_store
from storage.runs.events import Events
from storage.runs.run import Run
from storage.weights.attempt_claim import claim_attempt
from tba.errors import ConfigError, Missing, RunFailed, Superseded
from tba.types import Version
from tests.support.builders import from_table, make_shard, rows_in, rows_of
from tests.support.faults.rewriting import replace_text, with_digest
from tests.support.flows.roles import is_running
from tests.support.storage.synthetic import EVERY, PROMPTS, make_config
from tests.support.waiting import until

RESPONSES = [0.0, 0.5, 1.0]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = create.start(make_config(), str(tmp_path), "first")
    claim_attempt(run)
    for round in range(3):
        append(run, round)
    return run


@pytest.fixture
def buffer_process(run: Run) -> Iterator[BufferProcess]:
    with BufferProcess(run, 1, 1, deadline=60) as buffer_process:
        yield buffer_process


def append(run: Run, round: int) -> None:
    for searcher in range(2):
        rewards = dict.fromkeys(PROMPTS[searcher::2], RESPONSES)
        versions = {"version_start": Version(0, 1), "version_end": Version(0, 1)}
        mask = (True, False, True, True) if round % 2 else None
        steps = {} if round % 2 else {"step_ends": (1 + round % 3, 4), "step_values": (0.25 * searcher, 0.5)}
        shard = make_shard(rewards, searcher=searcher, round=round, loss_mask=mask, **steps, **versions)
        Trajectories(run).append(searcher, round, shard)


def test_a_buffer_process_records_draws_and_fetches_like_the_buffer(run: Run, buffer_process: BufferProcess):
    """If one of them has made a record, the other uses it."""
    buffer = make_buffer(run, make_config(), 1, Events(run, "trainer", 2))
    assert (buffer.recorded(0), buffer.waiting()) == (False, 54)
    assert (buffer_process.recorded(0), buffer_process.waiting()) == (False, 54)
    masks = []
    for sync in range(3):
        assert buffer_process.sync(sync, step=sync * EVERY) == buffer.sync(sync, step=sync * EVERY)
        assert buffer_process.queues() == buffer.queues()
        for step in (sync * EVERY + 1, sync * EVERY + 2):
            draws = buffer_process.draw(step)
            assert draws == buffer.draw(step)
            found = buffer_process.fetch(draws)
            assert rows_of(found) == rows_of(buffer.fetch(draws))
            masks += [found.loss_mask.elements_N] if found.loss_mask else []
        append(run, 3 + sync)
    assert buffer_process.recorded(2)
    assert masks and not any(mask.all() for mask in masks)


def test_an_objective_over_tokens_gets_their_log_probabilities_and_the_values_of_steps(run: Run):
    plain = json.loads(open_store(run.url).read(layout.RUN))
    plain["config"]["objective"] = {"name": "vine-ppo"}
    plain["config"]["search"]["value_samples"] = 9
    rewrite(run, with_digest(plain))
    with BufferProcess(run, 1, 1, deadline=60) as buffer_process:
        buffer_process.sync(0, step=0)
        fetched = buffer_process.fetch(draws := buffer_process.draw(1))
    stored = {}
    for shard in run.store.list(layout.TRAJECTORIES):
        stored |= {it.trajectory_id: it for it in from_table(decode(run.store.read(shard.key)))}
    assert fetched.behaviour_logps is not None
    assert rows_of(fetched) == rows_of(fetched_of([stored[draw.trajectory_id] for draw in draws]))
    expected = [stored[draw.trajectory_id].behaviour_logps for draw in draws]
    assert fetched.behaviour_logps.elements_N.tolist() == [number for logps in expected for number in logps]
    assert fetched.behaviour_logps.lengths_B.tolist() == [len(logps) for logps in expected]
    assert rows_in(fetched.step_ends) == [stored[draw.trajectory_id].step_ends or () for draw in draws]
    assert rows_in(fetched.step_values) == [stored[draw.trajectory_id].step_values or () for draw in draws]
    assert {len(row) for row in rows_in(fetched.step_ends)} == {0, 2}


def rewrite(run: Run, record: bytes) -> None:
    store = open_store(run.url)
    store.delete(layout.RUN)
    store.create(layout.RUN, record)


def test_a_buffer_process_goes_on_from_the_queues_of_a_checkpoint(run: Run, buffer_process: BufferProcess):
    buffer_process.sync(0, step=0)
    queues = buffer_process.queues()
    draws = [buffer_process.draw(1), buffer_process.draw(2)]
    with BufferProcess(run, 1, 2, deadline=60) as later:
        later.replay(0)
        later.restore(queues)
        assert [later.draw(1), later.draw(2)] == draws


def test_the_errors_of_a_buffer_process_are_those_of_the_buffer(run: Run, buffer_process: BufferProcess):
    with pytest.raises(Missing, match=r"000000\.json does not exist"):
        buffer_process.replay(3)
    buffer_process.sync(0, step=0)
    claim_attempt(run)
    with pytest.raises(Superseded, match="attempt 2 of the trainer has taken over from attempt 1"):
        buffer_process.sync(1, step=EVERY)
    assert not buffer_process.recorded(1)
    with pytest.raises(RuntimeError, match="ValueError: records are applied in order"):
        buffer_process.sync(7, step=7 * EVERY)
    assert len(buffer_process.draw(1)) == 4  # the process goes on


def test_the_first_order_to_a_buffer_process_that_cannot_make_its_buffer_raises_the_error(run: Run):
    replace_text(Path(run.url, layout.RUN), "select", "selct")
    with BufferProcess(run, 1, 1, deadline=60) as buffer_process, pytest.raises(ConfigError, match="selct"):
        buffer_process.waiting()


def test_a_buffer_process_that_was_killed_is_named(buffer_process: BufferProcess):
    buffer_process.process.kill()
    pid = buffer_process.process.pid
    died = rf"the process of the replay buffer \(pid {pid}\) has died \(SIGKILL\) after the order 'draw'"
    with pytest.raises(RunFailed, match=died):
        buffer_process.draw(1)


def test_a_buffer_process_that_does_not_answer_is_killed_and_named(run: Run):
    with BufferProcess(run, 1, 1, deadline=60) as buffer_process:
        assert buffer_process.waiting() == 54
        buffer_process.deadline = 0.5
        buffer_process.process.send_signal(signal.SIGSTOP)
        with pytest.raises(RunFailed, match=r"has not answered for 0\.5 s after the order 'draw'"):
            buffer_process.draw(1)
    assert buffer_process.process.returncode == -signal.SIGKILL


def test_the_first_order_to_a_buffer_process_that_cannot_open_its_run_raises_the_error(run: Run):
    open_store(run.url).delete(layout.RUN)
    with BufferProcess(run, 1, 1, deadline=60) as buffer_process, pytest.raises(Missing, match=r"run\.json"):
        buffer_process.waiting()


def test_signals_that_are_meant_for_the_trainer_do_not_end_a_buffer_process(run: Run):
    """The process ignores them from its start, even while it still imports."""
    with BufferProcess(run, 1, 1, deadline=60) as buffer_process:
        for _ in range(2):
            for number in (signal.SIGTERM, signal.SIGINT):
                buffer_process.process.send_signal(number)
            assert buffer_process.waiting() == 54


def test_a_buffer_process_ends_with_its_trainer_however_the_trainer_ends(run: Run):
    program = (
        "import sys, time; from flows.roles.buffer_process import BufferProcess; from storage.runs.run import Run\n"
        "buffer_process = BufferProcess(Run.open(sys.argv[1]), 1, 1, deadline=60); buffer_process.waiting()\n"
        "print(buffer_process.process.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, run.url], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout
        pid = int(trainer.stdout.readline())
        assert is_running(pid)
        if sys.platform == "linux":
            os.kill(pid, signal.SIGSTOP)  # so that it cannot notice that its orders have ended
        os.kill(trainer.pid, signal.SIGKILL)
        until(lambda: not is_running(pid), "the process ends")
