"""A process that serves another: deaf to what asks that one to stop, and gone when it is."""

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
    """With pipes to its standard input and output. From its first instant on it leaves signals to stop to its parent,
    who may still need it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)  # a process inherits what is blocked
    try:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=bufsize, env=env)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """In a child: die when the thread dies that started it, also in the middle of work. Where Linux does not see to
    that, and if it is dead already, the end of the child's standard input says so."""
    ask_linux(_PR_SET_PDEATHSIG, signal.SIGKILL)


def ask_linux(option: int, value: int) -> None:
    """prctl(2), where there is one."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
