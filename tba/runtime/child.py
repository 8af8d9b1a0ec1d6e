"""Child processes that ignore requests to stop their parent, and end when the parent has ended."""

import ctypes
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

_PR_SET_PDEATHSIG = 1
_STOPPING = (signal.SIGTERM, signal.SIGINT)


def start_child(
    command: Sequence[str], *, bufsize: int = -1, env: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Start a process with pipes to its standard input and output. SIGTERM and SIGINT are blocked in it from its first
    instant on: the parent, which gets these signals too, may still need it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)  # a child inherits which signals are blocked
    try:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=bufsize, env=env)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """In a child: let Linux kill this process when the thread that started it ends, even in the middle of work. On
    other systems, or if that thread has ended already, the child must notice the end of its standard input."""
    ask_linux(_PR_SET_PDEATHSIG, signal.SIGKILL)


def ask_linux(option: int, value: int) -> None:
    """Call prctl(2) on Linux; do nothing on other systems."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
