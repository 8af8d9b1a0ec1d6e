"""The threads of a process that computes: how many, and how soon one gives way to another."""

import os
import sys

from tba.runtime.child import ask_linux

SWITCH_SECONDS = 1e-5
"""How soon a trainer's step gets the interpreter back from the threads beside it, which write what a sync stores and
ask the reader. With Python's own 5 ms a step stood still for three times as long, measured beside a thread that reads.
"""

_PR_SET_TIMERSLACK = 29


def switch_soon() -> None:
    """Let no thread of this process wait longer for the interpreter than `SWITCH_SECONDS`."""
    sys.setswitchinterval(SWITCH_SECONDS)
    ask_linux(_PR_SET_TIMERSLACK, 1)  # nanoseconds; a wait of this thread is otherwise up to 50 us longer than asked


def use_threads(threads: int) -> None:
    """Import torch, with so many threads for its arithmetic; 0 leaves their number to it."""
    if threads:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    import torch

    if threads:
        torch.set_num_threads(threads)
