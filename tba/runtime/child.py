"""Child processes that serve a role. A child carries out the orders that it reads from its standard input, and writes
an answer to each on its standard output.

SIGTERM and SIGINT, which ask the parent to stop, are blocked in a child. A child ends when its parent has ended.
"""

import ctypes
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, Self

from tba.errors import TBAError
from tba.runtime.messages import Numbers, receive, send

END_PATIENCE = 10.0  # seconds for a child to end when it is no longer needed, or to report why it ended

_PR_SET_PDEATHSIG = 1
_STOPPING = (signal.SIGTERM, signal.SIGINT)


# --- the parent's side ------------------------------------------------------------------------------------------------


def module_command(module: str) -> list[str]:
    """Return the command that runs a module of ours, even if the working directory has a folder of the same name."""
    return [sys.executable, "-P", "-m", module]


def start_child(
    command: Sequence[str], *, stdin: int, stdout: int | None = None, env: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Start a process in which SIGTERM and SIGINT are blocked from the start, because the parent, which gets these
    signals too, may still need the child."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)  # a child inherits which signals are blocked
    try:
        return subprocess.Popen(command, stdin=stdin, stdout=stdout, env=env)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_child(process: "subprocess.Popen[bytes]", patience: float = END_PATIENCE) -> None:
    """Wait for a child to end. Kill it if this takes longer than `patience` seconds."""
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def how_ended(process: "subprocess.Popen[bytes]") -> str:
    try:
        code = process.wait(END_PATIENCE)
    except subprocess.TimeoutExpired:
        return "its process is still running"
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


class Child:
    """A child process that serves the current process. Its standard input and output carry messages."""

    def __init__(self, what: str, command: Sequence[str], *, env: Mapping[str, str] | None = None):
        self.process = start_child(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        assert self.process.stdin and self.process.stdout
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.name = f"{what} (pid {self.process.pid})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, said: Any, numbers: Numbers = ()) -> None:
        """Send a message. If the child has ended, do nothing; `receive` then returns None."""
        with suppress(BrokenPipeError):
            send(self.stdin, said, numbers)

    def receive(self) -> tuple[Any, Numbers] | None:
        """Wait for the next message and return it. Return None if the child has ended."""
        return receive(self.stdout)

    @contextmanager
    def killed_after(self, seconds: float) -> Iterator[threading.Event]:
        """Yield an event. If the `with` block takes longer than this, set the event and kill the child."""
        passed = threading.Event()

        def end() -> None:
            passed.set()
            self.process.kill()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            yield passed
        finally:
            timer.cancel()

    def how_ended(self) -> str:
        return how_ended(self.process)

    def release(self) -> None:
        """Close the pipe of orders, so that the child ends after the orders that were sent."""
        with suppress(BrokenPipeError):
            self.stdin.close()

    def close(self) -> None:
        """Close the pipe of orders, and wait for the child to end. Kill the child if this takes longer than
        END_PATIENCE. `stdout` stays open; the caller that receives from it must close it."""
        self.release()
        end_child(self.process)


# --- the child's side -------------------------------------------------------------------------------------------------


def end_with_parent() -> None:
    """In a child: let Linux kill this process when the thread that started it ends, even in the middle of work. On
    other systems, or if that thread has ended already, the child must notice the end of its standard input."""
    ask_linux(_PR_SET_PDEATHSIG, signal.SIGKILL)


def ask_linux(option: int, value: int) -> None:
    """Call prctl(2) on Linux; do nothing on other systems."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def serve(obey: Callable[[str, Any, Numbers], tuple[Any, Numbers]], orders: BinaryIO, answers: BinaryIO) -> None:
    """Carry out orders until there are no more, and answer each with its result or its error."""
    while (order := receive(orders)) is not None:
        said, numbers = order
        try:
            result, numbers = obey(said["do"], said["with"], numbers)
        except Exception as error:
            with suppress(BrokenPipeError):
                send(answers, {"error": type(error).__name__, "says": str(error)})
            if not isinstance(error, TBAError):
                traceback.print_exc()
            continue
        with suppress(BrokenPipeError):
            send(answers, {"is": result}, numbers)
