"""Child processes that serve a role: they obey orders sent through a pipe, and answer each through another.

A child leaves signals to stop to its parent, who may still need it, and ends when its parent ends.
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

END_PATIENCE = 10.0  # seconds for a child to end when it is no longer needed, or to say why it has ended

_PR_SET_PDEATHSIG = 1
_STOPPING = (signal.SIGTERM, signal.SIGINT)


# --- the parent's side ------------------------------------------------------------------------------------------------


def module_command(module: str) -> list[str]:
    """Return the command that runs a module of ours, also if the working directory has a folder of the same name."""
    return [sys.executable, "-P", "-m", module]


class Child:
    """A process that serves this one. Its standard input and output carry messages. Linux ends the process when the
    thread that started it ends."""

    def __init__(self, what: str, command: Sequence[str], *, env: Mapping[str, str] | None = None):
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)  # a process inherits what is blocked
        try:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert self.process.stdin and self.process.stdout
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.name = f"{what} (pid {self.process.pid})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, said: Any, numbers: Numbers = ()) -> None:
        """Send a message. If the child has ended, `receive` says so."""
        with suppress(BrokenPipeError):
            send(self.stdin, said, numbers)

    def receive(self) -> tuple[Any, Numbers] | None:
        """Wait for the next message, and return None once the child has ended."""
        return receive(self.stdout)

    @contextmanager
    def killed_after(self, seconds: float) -> Iterator[threading.Event]:
        """Kill the child, and set the event, if the `with` block takes longer than this."""
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
        try:
            code = self.process.wait(END_PATIENCE)
        except subprocess.TimeoutExpired:
            return "it has not ended"
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def release(self) -> None:
        """Let the child end: it gets no more orders."""
        with suppress(BrokenPipeError):
            self.stdin.close()

    def close(self) -> None:
        """End the child. Whoever receives its messages closes `stdout`."""
        self.release()
        try:
            self.process.wait(END_PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


# --- the child's side -------------------------------------------------------------------------------------------------


def end_with_parent() -> None:
    """In a child: die when the thread dies that started it, also in the middle of work. Where Linux does not see to
    that, and if it is dead already, the end of the child's standard input says so."""
    ask_linux(_PR_SET_PDEATHSIG, signal.SIGKILL)


def ask_linux(option: int, value: int) -> None:
    """prctl(2), where there is one."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def serve(
    obey: Callable[[str, Any, Numbers], tuple[Any, Numbers]],
    orders: BinaryIO,
    answers: BinaryIO,
    *,
    ends_at_error: bool = False,
) -> None:
    """Obey orders until there are no more, and answer each with what it finds or with its error."""
    while (order := receive(orders)) is not None:
        said, numbers = order
        try:
            found, numbers = obey(said["do"], said["with"], numbers)
        except Exception as error:
            tell_error(answers, error)
            if ends_at_error:
                raise
            if not isinstance(error, TBAError):
                traceback.print_exc()
            continue
        with suppress(BrokenPipeError):
            send(answers, {"is": found}, numbers)


def tell_error(answers: BinaryIO, error: Exception) -> None:
    with suppress(BrokenPipeError):
        send(answers, {"error": type(error).__name__, "says": str(error)})
