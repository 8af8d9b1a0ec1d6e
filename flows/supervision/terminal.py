"""Supervise a run from a terminal and show its progress: `tba run` and `tba resume`, without Prefect."""

import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self

from flows.supervision.background_supervisor import Background, local_launcher
from flows.supervision.interfaces import Event
from flows.supervision.processes import Role
from flows.supervision.supervisor import supervise
from storage.runs.lease_watch import Seen
from storage.runs.run import Run
from tba.config import Config, parse
from tba.errors import Stopped

WORD_EVERY = 30.0  # seconds between two lines about the trainer's progress if the output is no terminal


def run_here(run: Run, *, external_trainer: bool = False) -> None:
    """Keep a run's roles alive on this machine until the run has finished, and show its progress. Ctrl-C stops the
    roles in order. A second Ctrl-C ends this process at once; the roles then stop by themselves. With
    `external_trainer`, something else starts the trainer."""
    config = parse(run.config)
    with ending_on_sigterm(), Display(run, config) as display:
        launcher = local_launcher(run, config, trains=not external_trainer)
        work = partial(supervise, run, launcher, config, on_look=display.look, external_trainer=external_trainer)
        with Background(work, last=display.tell) as background:
            try:
                for event in background.news():
                    if event:
                        display.tell(event)
            except (KeyboardInterrupt, SystemExit):
                display.say(f"stopping; `tba resume {run.url}` goes on from there (Ctrl-C again exits at once)")
                raise
            except Stopped as stopped:
                raise Stopped(f"{stopped}; `tba resume {run.url}` goes on from there") from None


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Make SIGTERM raise an exception, so that all open `with` blocks clean up, as on Ctrl-C. Further SIGTERMs are
    ignored until the process has ended, because one stop may send two: `make` sends one to its children, and `timeout`
    one to their process group. Outside of the main thread this context does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    after = signal.getsignal(signal.SIGTERM)

    def end(*_: object) -> None:
        nonlocal after
        after = signal.SIG_IGN  # unlike a function, it holds while the interpreter shuts down
        signal.signal(signal.SIGTERM, lambda *_: None)  # unlike SIG_IGN, processes that are started do not inherit it
        sys.exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, after)


class Display:
    """Shows a supervised run in a terminal: its events, and below them one line for each role."""

    def __init__(self, run: Run, config: Config):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self.run, self.steps = run, config.training.steps
        self.console = Console(stderr=True, highlight=False)
        columns = (TextColumn("{task.fields[role]:<14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = Progress(
            *columns, TextColumn("{task.description}"), console=self.console, disable=not self.console.is_terminal
        )
        self.lines: dict[str, Any] = {}
        self.next_word = 0.0

    def tell(self, event: Event) -> None:
        style = {"warning": "yellow", "error": "red"}.get(event.severity, "")
        self.console.print(event.message, style=style, markup=False, soft_wrap=True)

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def look(self, seen: Mapping[str, Seen]) -> None:
        for name in filter(Role.parse, sorted(seen)):
            lease = seen[name].lease
            if name not in self.lines:
                total = self.steps if name == "trainer" else None
                self.lines[name] = self.progress.add_task("", total=total, role=name)
            done = lease.progress.get("step" if name == "trainer" else "round", 0)
            share = f" ({lease.progress['share']:.0%})" if "share" in lease.progress else ""
            self.progress.update(self.lines[name], description=lease.status + share, completed=int(done))
            if name == "trainer" and self.progress.disable and time.monotonic() >= self.next_word:
                self.next_word = time.monotonic() + WORD_EVERY
                self.say(f"trainer: {lease.status}{share}")

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.progress.stop()
