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
    """Run every experiment that `missing` yields, at most `jobs` at a time. Pass each result to `done`, and ask
    `missing` again. Start no experiment after `hours`, nor after one has failed: then raise its error once the others
    have finished. `take` must be a function of a module."""
    ends = time.monotonic() + 3600 * hours
    running: dict[Future[Row], Run] = {}
    failed: BaseException | None = None
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_prepare) as pool:
        while True:
            for run in missing():
                if len(running) == jobs or failed or time.monotonic() >= ends:
                    break
                if run not in running.values():
                    running[pool.submit(take, run)] = run
            if not running:
                break
            for it in wait(running, return_when=FIRST_COMPLETED).done:
                del running[it]
                if error := it.exception():
                    failed = failed or error
                else:
                    done(it.result())
    if failed:
        raise failed


def _prepare() -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()
