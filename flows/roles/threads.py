"""Set how many threads a computing process uses, and how long one thread waits for another."""

import os
import sys

from tba.runtime.child import ask_linux

SWITCH_SECONDS = 1e-5
"""How long the thread that computes a gradient step waits at most for Python's interpreter lock, in seconds. Other
threads of the trainer hold the lock while they store a sync or talk to the reader. With Python's default of 5 ms, a
step waited three times as long, measured beside a thread that reads."""

_PR_SET_TIMERSLACK = 29


def switch_soon() -> None:
    """Let no thread of this process wait longer for the interpreter lock than `SWITCH_SECONDS`."""
    sys.setswitchinterval(SWITCH_SECONDS)
    ask_linux(_PR_SET_TIMERSLACK, 1)  # nanoseconds; by default, Linux wakes a thread up to 50 us late


def use_threads(threads: int) -> None:
    """Import torch, and let it compute with this number of threads. With 0, torch chooses the number."""
    if threads:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    import torch

    if threads:
        torch.set_num_threads(threads)
