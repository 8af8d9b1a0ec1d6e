"""The helper process for algebra: it is ended in time, replaced when it is gone, and ends with its parent."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from tba.errors import RunFailed
from tba.grading import algebra_process
from tba.grading.algebra_process import Helper

ENDLESS = "9^{9^{9^{9}}}"


@contextmanager
def made(*, seconds: float = 60.0, patience: float = 120.0) -> Iterator[Helper]:
    with closing(Helper(seconds=seconds, patience=patience)) as it:
        yield it


def pid(it: Helper) -> int:
    assert it.child
    return it.child.process.pid


def is_there(number: int) -> bool:
    """Return True if a process runs and is not a zombie."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_gone_soon(number: int) -> bool:
    deadline = time.monotonic() + 30
    while is_there(number) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_there(number)


def test_it_knows_what_is_equal_and_what_the_library_says():
    with made() as it:
        assert it.ask("equal", "(x+1)^2", "x^2+2x+1")
        assert not it.ask("equal", "(x+1)^2", "x^2+1")
        assert it.ask("verified", r"\{1,2\}", r"\{2,1\}")
        assert not it.ask("verified", "(1,2)", "[1,2]")


@pytest.mark.parametrize("what", ["equal", "verified"])
def test_a_comparison_that_takes_too_much_time_of_the_processor_is_wrong_and_the_next_is_made(what: str):
    with made(seconds=1.0) as it:
        assert it.ask(what, "2x", "x+x")
        first, began = pid(it), time.monotonic()
        assert not it.ask(what, ENDLESS, "7")
        assert time.monotonic() - began < 60  # less than the patience for a helper that hangs
        assert not is_there(first)
        assert it.ask(what, "3x", "x+2x")


def test_a_comparison_that_gets_no_time_of_the_processor_is_wrong_once_patience_ends():
    with made(patience=2.0) as it:
        assert it.ask("equal", "2x", "x+x")
        first = pid(it)
        os.kill(first, signal.SIGSTOP)
        began = time.monotonic()
        assert not it.ask("equal", "2x", "x+x")
        assert time.monotonic() - began < 20
        assert not is_there(first)
        it.patience = 120.0
        assert it.ask("equal", "2x", "x+x")


def test_what_would_fill_the_pipe_of_a_helper_that_stands_still_is_wrong():
    with made(patience=5.0) as it:
        assert it.ask("equal", "2x", "x+x")
        os.kill(pid(it), signal.SIGSTOP)
        assert not it.ask("equal", "1", "1+" * 100_000 + "1")


def test_a_helper_that_was_killed_is_replaced():
    with made() as it:
        assert it.ask("equal", "2x", "x+x")
        first = pid(it)
        os.kill(first, signal.SIGKILL)
        assert it.ask("equal", "3x", "x+2x")
        assert pid(it) != first


def test_an_answer_is_not_wrong_because_its_helper_was_killed_over_it():
    with made() as it:
        assert it.ask("equal", "2x", "x+x")
        first = pid(it)
        os.kill(first, signal.SIGSTOP)  # so that the helper cannot finish
        threading.Timer(0.5, os.kill, (first, signal.SIGKILL)).start()
        assert it.ask("equal", "3x", "x+2x")


def test_a_grader_that_was_interrupted_does_not_take_the_answer_for_the_next_one():
    def interrupt(*_: object) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with made() as it:
            assert it.ask("equal", "2x", "x+x")
            first = pid(it)
            os.kill(first, signal.SIGSTOP)
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            with pytest.raises(InterruptedError):
                it.ask("equal", "3x", "x+2x")
            with suppress(ProcessLookupError):
                os.kill(first, signal.SIGCONT)
            assert not it.ask("equal", "4x", "x")
    finally:
        signal.signal(signal.SIGALRM, before)


def test_what_asks_the_grader_to_stop_does_not_reach_the_helper():
    with made() as it:
        assert it.ask("equal", "2x", "x+x")
        first = pid(it)
        for stopping in (signal.SIGINT, signal.SIGTERM):
            os.kill(first, stopping)
        assert it.ask("equal", "3x", "x+2x")
        assert pid(it) == first


def test_closing_ends_it():
    with made() as it:
        it.ask("equal", "2x", "x+x")
        first = pid(it)
    assert not is_there(first)


def test_a_helper_that_cannot_start_fails_the_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with made() as it, pytest.raises(RunFailed, match="did not start"):
        it.ask("equal", "2x", "x+x")


@pytest.mark.parametrize(
    "end",
    [
        "pass",  # the program reaches its end
        "os.kill(os.getpid(), signal.SIGKILL)",
        "threading.Thread(target=it.ask, args=('equal', '9^{9^{9^{9}}}', '7')).start(); time.sleep(0.5); "
        "os.kill(os.getpid(), signal.SIGKILL)",  # while the helper compares
    ],
)
def test_it_ends_with_the_process_that_started_it(end: str):
    script = (
        "import os, signal, threading, time\n"
        "from tba.grading.algebra_process import Helper\n"
        "it = Helper(seconds=600)\n"
        "assert it.ask('equal', '2x', 'x+x')\n"
        "print(it.child.process.pid, flush=True)\n"
        f"{end}\n"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert is_gone_soon(int(out.stdout)), out.stderr


def test_a_grader_and_its_fork_do_not_read_each_others_answers():
    script = (
        "import os, sys\n"
        "from tba.grading.algebra_process import equal\n"
        "assert equal('2x', 'x+x')\n"
        "child = os.fork()\n"
        "right = child == 0  # each wants what the other does not\n"
        "found = [equal(f'{n}x', f'x+{n - 1 if right else n}x') for n in range(3, 100)]\n"
        "as_wanted = found == [right] * 97\n"
        "sys.exit(0 if as_wanted and (child == 0 or os.waitpid(child, 0)[1] == 0) else 1)\n"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr


def test_what_text_alone_decides_starts_no_process_and_imports_no_algebra():
    script = (
        "import os, sys\n"
        "from tba.tasks.registry import grade, rules\n"
        "for rule in rules('math'):\n"
        "    for given, gold in [('18', '18'), ('17', '18'), (r'\\frac12', r'\\dfrac{1}{2}'), ('(1,2)', '(1, 2)')]:\n"
        "        assert grade('math', rule, r'\\boxed{%s}' % given, gold) == (given != '17')\n"
        "assert not {'sympy', 'math_verify', 'latex2sympy2_extended', 'torch'} & set(sys.modules)\n"
        "print(open(f'/proc/self/task/{os.getpid()}/children').read())\n"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == ""


def test_an_answer_that_many_responses_share_is_compared_once(monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(Helper, "ask", lambda self, *order: asked.append(order) or True)
    assert algebra_process.equal("17x", "x+16x") and algebra_process.equal("17x", "x+16x")
    assert asked == [("equal", "17x", "x+16x")]
    algebra_process.equal.cache_clear()
