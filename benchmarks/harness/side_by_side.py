"""Runs several experiments at a time, each in a process of its own with one thread."""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from typing import TypeVar

import torch
from transformers.utils import logging

Run = TypeVar("Run")
Row = TypeVar("Row")


def run_all(
    missing: Callable[[], Iterable[Run]],
    take: Callable[[Run], Row],
    done: Callable[[Row], None],
    *,
    jobs: int,
    hours: float,
) -> None:
    """Take whatever `missing` returns until nothing is missing, and call `done` as soon as one has finished. Start none
    after this many hours. `missing` is asked again after each, and `take` must be a function of a module."""
    ends = time.monotonic() + 3600 * hours
    running: dict[Future[Row], Run] = {}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_prepare) as pool:
        while True:
            under_way = list(running.values())
            for run in missing():
                if len(running) < jobs and time.monotonic() < ends and run not in under_way:
                    running[pool.submit(take, run)] = run
            if not running:
                return
            for it in wait(running, return_when=FIRST_COMPLETED).done:
                del running[it]
                done(it.result())


def _prepare() -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()
