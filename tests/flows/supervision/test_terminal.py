import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from flows.commands import arguments
from flows.commands import run as run_command
from flows.supervision.background_supervisor import Background
from flows.supervision.gpus import Devices
from flows.supervision.interfaces import Event, StopRequest
from flows.supervision.one_life import watch_one
from flows.supervision.processes import STOPPED, LocalLauncher, Role
from flows.supervision.supervisor import supervise
from flows.supervision.terminal import run_here
from storage.objects.local_store import LocalStore
from storage.runs.control import change_state, read_state
from storage.runs.leases import read_leases
from storage.runs.run import Run
from tba.config import parse
from tba.errors import RunFailed, Stopped, Superseded
from tba.presets import preset
from tests.support.flows.roles import (
    LIMITS,
    SCRIPT_ROLE,
    at_work,
    behave,
    end_roles,
    finish,
    is_running,
    script,
    until,
    works,
)

ROLES = ("trainer", "evaluator", "searcher-000")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setenv("TBA_ROLE_COMMAND", f"{sys.executable} {SCRIPT_ROLE}")
    config = preset("quickstart").replace(LIMITS)
    run = Run.create(str(tmp_path), "r", config=config.to_dict(), sampler_sql="select 1", code_version="test")
    change_state(run, desired="run", searchers=1)
    yield run
    end_roles(run)


def later(action: Callable[[], object], run: Run) -> None:
    """Do something to a run once all its roles are at work."""
    threading.Thread(target=lambda: (at_work(run, *ROLES), action()), daemon=True).start()


def test_a_run_goes_to_its_end_without_prefect(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("flows.supervision.terminal.WORD_EVERY", 0.1)
    later(partial(finish, run), run)
    run_here(run)
    said = capsys.readouterr().err
    assert "run r has finished" in said
    assert "trainer: " in said, "how far it is, also where no bar can be drawn"


def test_a_run_from_the_command_line_ends_with_the_scores_of_its_last_version(
    run: Run, capsys: pytest.CaptureFixture[str]
):
    later(partial(finish, run), run)
    assert run_command.supervise(run) == 0
    assert capsys.readouterr().out.startswith("version 1, step 4: greedy 0.75\n\n")


def test_each_event_is_shown_once(run: Run):
    behave(run, "searcher-000", "fail")
    command = [sys.executable, "-m", "flows.cli", "resume", run.url]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert process.returncode == arguments.FOUND_WRONG
    assert process.stderr.count("searcher-000 is started again in 1 s") == 1, process.stderr
    assert process.stderr.count("searcher-000, life 1, failed with exit code 1: there is no such model") == 1


def test_a_failure_reaches_the_caller_with_the_roles_last_words(run: Run):
    behave(run, "trainer", "misuse")
    with pytest.raises(RunFailed, match="there is no such model"):
        run_here(run)


def test_a_run_that_was_asked_to_stop_says_how_to_go_on(run: Run):
    later(partial(change_state, run, desired="stop", why="enough"), run)
    with pytest.raises(Stopped, match=f"enough; `tba resume {run.url}`"):
        run_here(run)


@pytest.mark.parametrize(
    ("numbers", "code"), [([signal.SIGINT], 130), ([signal.SIGTERM], 143), ([signal.SIGTERM] * 3, 143)]
)
def test_a_program_that_is_told_to_end_stops_its_roles_first(run: Run, numbers: list[signal.Signals], code: int):
    program = (
        "import sys; from flows.supervision.terminal import run_here; from storage.runs.run import Run\n"
        "try: run_here(Run.open(sys.argv[1]))\n"
        "except KeyboardInterrupt: sys.exit(130)"
    )
    process = subprocess.Popen([sys.executable, "-c", program, run.url], stderr=subprocess.PIPE, text=True)
    leases = at_work(run, *ROLES)
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.2)
    _, said = process.communicate(timeout=30)
    assert process.returncode == code
    assert f"`tba resume {run.url}` goes on from there" in said
    assert not any(is_running(lease.pid) for lease in leases.values())
    assert read_state(run).desired == "stop"
    assert {lease.status for lease in read_leases(run)} == {"stopped"}


@pytest.mark.parametrize("when", ["after the context", "at exit"])
def test_a_second_sigterm_does_not_change_the_exit_code_of_a_program_that_is_ending(when: str):
    program = (
        "import atexit, os, signal, sys; from flows.supervision.terminal import ending_on_sigterm\n"
        "def end(): os.kill(os.getpid(), signal.SIGTERM)\n"
        "if sys.argv[1] == 'at exit': atexit.register(end)\n"
        "try:\n"
        "    with ending_on_sigterm(): end()\n"
        "finally:\n"
        "    if sys.argv[1] == 'after the context': end()"
    )
    assert subprocess.run([sys.executable, "-c", program, when], timeout=60).returncode == 128 + signal.SIGTERM


def test_leaving_the_context_by_an_exception_stops_the_work_first():
    asked: list[StopRequest] = []

    def work(*, should_stop, on_event):
        on_event(Event("began", "it began"))
        asked.append(until(should_stop))
        on_event(Event("ended", "it ended"))

    last: list[Event] = []
    with pytest.raises(ZeroDivisionError), Background(work, within=7.0, last=last.append) as background:
        assert next(background.news()) == Event("began", "it began")
        raise ZeroDivisionError
    assert asked == [StopRequest("ZeroDivisionError in its supervisor", 7.0)]
    assert last == [Event("ended", "it ended")]


def test_one_life_is_watched_to_its_end_and_a_silent_one_is_killed(run: Run):
    events: list[Event] = []
    launcher = LocalLauncher(run, command=script, devices=Devices(run.url, uuids=[]))
    watch = partial(watch_one, run, launcher, parse(run.config).limits, Role("trainer"), on_event=events.append)
    behave(run, "trainer", "hang")
    code, words = watch(1)
    assert code == -signal.SIGKILL
    assert "trainer begins" in words
    assert [event.kind for event in events] == ["role-started", "role-silent"]
    behave(run, "trainer", "work")
    stopping = StopRequest("cancelled", within=20.0)
    code, _ = watch(2, should_stop=lambda: stopping if works(run, "trainer", life=2) else None)
    assert code == STOPPED


class Remote(LocalStore):
    """A local store that looks like a store on another host."""

    def local_path(self, key: str) -> None:
        return None


def test_logs_of_a_remote_run_are_brought_to_it_also_those_of_adopted_roles(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "cache"))
    remote = replace(run, store=Remote(run.url))
    config = parse(run.config)

    def supervised(should_stop):
        launcher = LocalLauncher(remote, devices=Devices(run.url, uuids=[]))
        supervise(remote, launcher, config, should_stop=should_stop)

    def first():
        with pytest.raises(Superseded):
            supervised(lambda: None)

    thread = threading.Thread(target=first, daemon=True)
    thread.start()
    at_work(run, *ROLES)
    assert not list(Path(run.url).glob("logs/*"))
    later(lambda: (thread.join(20), finish(run)), run)  # once the second supervisor has taken over
    supervised(lambda: None)
    thread.join(20)
    stored = {path.name: path.read_text() for path in Path(run.url).glob("logs/*")}
    assert stored.keys() == {f"{role}-0001.log" for role in ROLES}
    assert "trainer begins" in stored["trainer-0001.log"]
