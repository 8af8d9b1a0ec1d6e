"""Set how many threads a computing process uses, and how long threads wait for Python's interpreter lock."""

import os
import sys

from tba.config import Config
from tba.runtime.child import ask_linux

SWITCH_SECONDS = 1e-5
"""Seconds after which a thread that waits for Python's interpreter lock asks the holder to release it. Other threads of
the trainer hold the lock while they store a sync or talk to the buffer process, so a gradient step has to wait for it.
With Python's default of 5 ms, a step waited three times as long, in a measurement with one thread that reads."""

_PR_SET_TIMERSLACK = 29


def switch_soon() -> None:
    """Make threads of this process ask for the interpreter lock after they have waited `SWITCH_SECONDS` for it."""
    sys.setswitchinterval(SWITCH_SECONDS)
    ask_linux(_PR_SET_TIMERSLACK, 1)  # nanoseconds; by default, Linux wakes a thread up to 50 us late


def threads_of(config: Config, ranks: int | None = None) -> int:
    """Return the number of threads of each role; 0 leaves the number to torch. `ranks` is the number of ranks on this
    machine, by default `training.ranks`. Cores are not set aside for the evaluator, which is idle most of the time."""
    if config.model.threads != "shared":
        return config.model.threads
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // ((ranks or config.training.ranks) + config.search.searchers))


def use_threads(config: Config, ranks: int | None = None) -> None:
    """Import torch, and let it compute with the number of threads that the settings give to a role; see
    `threads_of`."""
    threads = threads_of(config, ranks)
    if threads:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    import torch

    if threads:
        torch.set_num_threads(threads)
