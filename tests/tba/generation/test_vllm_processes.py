"""The processes of vLLM's engines: how they end, take weights together, and wait for each other."""

import signal
import subprocess
import sys
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from tba.errors import RunFailed
from tba.generation.requests import generate
from tba.types import Version
from tests.support.models.vllm_examples import (
    LIMITS,
    PROMPTS,
    SEEDS,
    V0,
    V1,
    before_next,
    distance,
    make_generator,
    version_folders,
)
from tests.support.vllm import ON_CPU, SIMILAR, needs_vllm

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Version, Path]:
    """Return folders of versions with different weights."""
    return version_folders(tmp_path_factory.mktemp("versions"))


def test_an_engine_that_dies_ends_the_wait_for_it_and_other_children_of_the_role_live_on(
    folders: dict[Version, Path], monkeypatch: pytest.MonkeyPatch
):
    with closing(make_generator()) as generator:
        generator.adopt(folders[V0], V0)
        (core,) = generator.requests.engine.engine_core.resources.engine_manager.processes
        other = get_context("spawn").Process(target=pause)
        other.start()
        with monkeypatch.context() as patch:
            before_next(patch, generator.requests.engine, "step", core.kill)
            with pytest.raises(RunFailed, match="died while it generated"):
                generate(generator, PROMPTS, SEEDS, temperature=1.0, limits=LIMITS)
        with pytest.raises(RunFailed, match=str(V1)):
            generator.adopt(folders[V1], V1)
    try:
        other.join(1)
        assert other.is_alive()
    finally:
        other.kill()
        other.join()


def pause() -> None:
    signal.pause()


@pytest.mark.skipif(not ON_CPU and torch.cuda.device_count() < 2, reason="there is only one GPU here")
def test_an_engine_that_is_spread_over_several_processes_takes_a_version_in_all_of_them(
    folders: dict[Version, Path],
):
    with closing(make_generator(tensor_parallel=2)) as generator:
        for version in (V0, V1):
            generator.adopt(folders[version], version)
            groups = generate(generator, PROMPTS, SEEDS, temperature=1.0, limits=LIMITS)
            assert distance(folders[version], PROMPTS, groups, temperature=1.0) < SIMILAR


def test_a_process_whose_role_ended_before_it_could_hear_of_it_ends_too():
    """The engine's process is registered for this only seconds after its start."""
    role = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True, timeout=60)
    assert role.stdout == "begun\n", role.stderr


ORPHAN = """
import os
from multiprocessing import get_context, parent_process

def begin():
    from tba.generation.vllm_plugin import OURS, register
    print("begun", flush=True)
    os.environ[OURS] = "cpu"
    parent_process().join()
    register()
    print("goes on without it", flush=True)

if __name__ == "__main__":
    process = get_context("fork").Process(target=begin)
    process.start()
    os._exit(0)
"""


def test_on_a_cpu_processes_of_an_engine_sleep_while_they_wait_for_each_other():
    """A core that one of them needs to compute is not taken by another one that only waits."""
    used = subprocess.run([sys.executable, "-c", WAITS_HALF_A_SECOND], capture_output=True, text=True, timeout=120)
    assert float(used.stdout or "nan") < 0.1, used.stderr


WAITS_HALF_A_SECOND = """
import os, time
from tba.generation.vllm_plugin import OURS, register
os.environ[OURS] = "cpu"
register()
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
writer = MessageQueue(1, 1)
reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
writer.enqueue("a message")
reader.dequeue(timeout=10)
before = time.process_time()
try:
    reader.dequeue(timeout=0.5)
except TimeoutError:
    print(time.process_time() - before)
"""


def test_a_sleeping_process_of_an_engine_is_woken_by_every_message(tmp_path: Path):
    """The queue may not announce a message that follows another one closely. A process that only waits for these
    announcements would sleep for seconds although its message is there."""
    (script := tmp_path / "exchange.py").write_text(EXCHANGES_MESSAGES)
    exchanged = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert exchanged.stdout == "all arrived\n", exchanged.stderr


EXCHANGES_MESSAGES = """
import os, time
from multiprocessing import get_context
from tba.generation.vllm_plugin import OURS, register

os.environ[OURS] = "cpu"

def queues():
    register()
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
    return MessageQueue

def answer(pipe):
    Queue = queues()
    reader, writer = Queue.create_from_handle(pipe.recv(), 0), Queue(1, 1)
    pipe.send(writer.export_handle())
    while (pause := reader.dequeue(indefinite=True)) is not None:
        time.sleep(pause)
        writer.enqueue("done")

if __name__ == "__main__":
    pipe, theirs = get_context("spawn").Pipe()
    other = get_context("spawn").Process(target=answer, args=(theirs,), daemon=True)
    other.start()
    writer = queues()(1, 1)
    pipe.send(writer.export_handle())
    reader = queues().create_from_handle(pipe.recv(), 0)
    for pause in (0, 0, 0.05) * 20:
        writer.enqueue(pause)
        reader.dequeue(timeout=3)
    writer.enqueue(None)
    other.join()
    print("all arrived")
"""
