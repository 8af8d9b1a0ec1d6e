"""Roles use a GPU one after the other: two of them never at once, none twice while another waits."""

import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from flows.roles.gpu_shifts import GpuShifts
from tba.errors import Stopped
from tests.support.waiting import until


class Thing:
    """Holds memory while it is not parked."""

    def __init__(self) -> None:
        self.journal: list[str] = []

    def park(self) -> None:
        self.journal.append("park")

    def unpark(self) -> None:
        self.journal.append("unpark")


@pytest.fixture
def role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., GpuShifts]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a")

    def make(name: str, *, run: str = "runs/ours", check: Callable[[], None] = lambda: None):
        return GpuShifts(run, name, check=check, tell=print, folder=tmp_path)

    return make


def begun(role: GpuShifts) -> tuple[threading.Thread, threading.Event]:
    """Begin a shift in a thread. The event is set when the shift has begun."""
    has_begun = threading.Event()

    def begin() -> None:
        role.begin()
        has_begun.set()

    thread = threading.Thread(target=begin, daemon=True)
    thread.start()
    return thread, has_begun


def test_a_role_waits_until_the_shift_of_another_has_ended(role: Callable[..., GpuShifts]):
    trainer, searcher = role("trainer"), role("searcher-000")
    trainer.begin()
    _, has_begun = begun(searcher)
    assert not has_begun.wait(0.2)
    trainer.end()
    assert has_begun.wait(10)


def test_a_role_that_has_just_ended_lets_the_one_that_waits_go_first(role: Callable[..., GpuShifts]):
    trainer, searcher = role("trainer"), role("searcher-000")
    order: list[str] = []
    trainer.begin()

    def search() -> None:
        searcher.begin()
        order.append("searcher")
        searcher.end()

    thread = threading.Thread(target=search, daemon=True)
    thread.start()
    time.sleep(0.2)  # until it waits
    trainer.end()
    trainer.begin()
    order.append("trainer")
    thread.join(10)
    assert order == ["searcher", "trainer"]


def test_what_a_role_holds_is_parked_between_its_shifts_alone(role: Callable[..., GpuShifts]):
    shifts, thing = role("trainer"), Thing()
    shifts.begin()
    shifts.hold(thing, object(), None)
    shifts.begin()
    assert thing.journal == []
    shifts.end()
    shifts.end()
    assert thing.journal == ["park"]
    shifts.begin()
    assert thing.journal == ["park", "unpark"]


def test_memory_is_free_before_another_role_begins(role: Callable[..., GpuShifts]):
    class ParksSlowly(Thing):
        def park(self) -> None:
            time.sleep(0.2)
            super().park()

    trainer, thing = role("trainer"), ParksSlowly()
    trainer.begin()
    trainer.hold(thing)
    _, has_begun = begun(role("searcher-000"))
    threading.Thread(target=trainer.end).start()
    assert has_begun.wait(10)
    assert thing.journal == ["park"]


def test_roles_on_other_gpus_and_other_runs_without_gpu_do_not_wait(
    role: Callable[..., GpuShifts], monkeypatch: pytest.MonkeyPatch
):
    role("trainer").begin()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    role("searcher-000").begin()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    role("trainer").begin()
    role("trainer", run="runs/theirs").begin()


ROLE = """
import sys
from pathlib import Path
from flows.roles.gpu_shifts import GpuShifts
name, folder = sys.argv[1:]
shifts = GpuShifts("runs/ours", name, check=lambda: None, tell=lambda status: None, folder=Path(folder))
for order in sys.stdin:
    getattr(shifts, order.strip())()
    print(order.strip(), flush=True)
"""


class Process:
    """A role in a process of its own, which begins and ends shifts by order."""

    def __init__(self, name: str, folder: Path):
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", ROLE, name, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def order(self, what: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()

    def has_done(self, what: str) -> None:
        """Wait until an order is carried out."""
        assert self.process.stdout
        assert self.process.stdout.readline() == f"{what}\n"

    def do(self, what: str) -> None:
        self.order(what)
        self.has_done(what)

    def wait_in_queue(self) -> None:
        """Ask for a shift, and return when the role has a place in the queue."""
        before = set(self.folder.glob("*.place-*"))
        self.order("begin")
        until(lambda: bool(set(self.folder.glob("*.place-*")) - before), "a place in the queue")

    @property
    def waits(self) -> bool:
        assert self.process.stdout
        return not select.select([self.process.stdout], [], [], 0.3)[0]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Process]]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a")
    started = [Process(name, tmp_path) for name in ("trainer", "searcher-000", "evaluator", "searcher-001")]
    yield started
    for it in started:
        it.kill()
        for pipe in (it.process.stdin, it.process.stdout):
            if pipe:
                pipe.close()


def test_roles_begin_in_the_order_in_which_they_asked(processes: list[Process]):
    first, *others = processes
    first.do("begin")
    for it in others:
        it.wait_in_queue()
    for current, following in pairwise([first, *others, first]):
        current.do("end")
        current.wait_in_queue()  # behind all others
        following.has_done("begin")
        assert all(it.waits for it in processes if it is not following)


def test_a_role_that_was_killed_in_the_queue_holds_up_nobody(processes: list[Process], tmp_path: Path):
    holder, killed, following, last = processes
    holder.do("begin")
    for it in (killed, following, last):
        it.wait_in_queue()
    killed.kill()
    assert following.waits, "the GPU is not free yet"
    holder.do("end")
    following.has_done("begin")
    assert last.waits
    following.do("end")
    last.has_done("begin")
    assert not list(tmp_path.glob("*.place-*")), "and no place is left"


def test_a_role_that_was_killed_in_its_shift_makes_room_for_the_first_of_the_queue(processes: list[Process]):
    holder, first, second, _ = processes
    holder.do("begin")
    first.wait_in_queue()
    second.wait_in_queue()
    holder.kill()
    first.has_done("begin")
    assert second.waits


def test_a_role_that_is_asked_to_stop_stops_waiting_and_leaves_its_place(role: Callable[..., GpuShifts]):
    asked = threading.Event()

    def check() -> None:
        if asked.is_set():
            raise Stopped("enough")

    trainer = role("trainer")
    trainer.begin()
    asked.set()
    with pytest.raises(Stopped):
        role("searcher-000", check=check).begin()
    _, has_begun = begun(role("evaluator"))
    trainer.end()
    assert has_begun.wait(10)


def test_who_uses_the_gpu_is_told(tmp_path: Path, role: Callable[..., GpuShifts], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flows.roles.gpu_shifts._SILENT", 0.0)
    trainer, told = role("trainer"), list[str]()
    trainer.begin()
    waits = GpuShifts("runs/ours", "evaluator", check=lambda: None, tell=told.append, folder=tmp_path)
    begun(waits)
    until(lambda: bool(told), "a status")
    assert told[0] == "waiting 0 s for the GPU, which trainer uses"
    trainer.end()
