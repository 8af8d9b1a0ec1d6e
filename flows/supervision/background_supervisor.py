"""Run a supervisor in a thread of its own, so that the main thread stays free."""

import contextvars
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Protocol, Self

from flows.supervision.gpus import Devices, usable
from flows.supervision.interfaces import Event, StopRequest
from flows.supervision.processes import LocalLauncher, Role
from storage.runs.run import Run
from tba.config import Config
from tba.runtime.child import module_command

REASONS = {
    "KeyboardInterrupt": "interrupted",
    "SystemExit": "terminated",
    "TerminationSignal": "cancelled from Prefect",
}
"""The reason for a stop, by the name of the exception that left the `with` block."""


class Work(Protocol):
    """`supervise` or `one_life.watch_one`, with all arguments bound except these callbacks."""

    def __call__(self, *, should_stop: Callable[[], StopRequest | None], on_event: Callable[[Event], None]) -> Any: ...


class Background:
    """A context that runs `work` in a thread, while the main thread reads and reports the events of the work. So
    neither a signal nor a slow server interrupts the work. If an exception leaves the context, the context requests a
    stop in order and waits until the work has ended. `within` is the number of seconds until this process is killed, or
    None if nobody will kill it. `last` is called with each event of this wait."""

    def __init__(self, work: Work, *, within: float | None = None, last: Callable[[Event], None] = lambda event: None):
        self.work, self.within, self.last = work, within, last
        self.result: Any = None
        self._news: SimpleQueue[Event] = SimpleQueue()
        self._request: StopRequest | None = None
        self._error: BaseException | None = None
        context = contextvars.copy_context()  # it tells Prefect which flow run this is
        self._thread = threading.Thread(target=context.run, args=(self._work,), name="supervisor", daemon=True)

    def stop(self, why: str) -> None:
        self._request = self._request or StopRequest(why, self.within)

    def news(self, every: float = 0.5) -> Iterator[Event | None]:
        """Yield the events of the work until the work ends, and None every `every` seconds without an event. Raise the
        exception that ended the work, if there is one."""
        while True:
            running = self._thread.is_alive()
            yield from self._backlog()
            if not running:
                break
            try:
                yield self._news.get(timeout=every)
            except Empty:
                yield None
        if self._error:
            raise self._error

    def _backlog(self) -> Iterator[Event]:
        while True:
            try:
                yield self._news.get_nowait()
            except Empty:
                return

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._thread.is_alive() and kind is not None:
            self.stop(REASONS.get(kind.__name__, f"{kind.__name__} in its supervisor"))
        running = True
        while running:
            self._thread.join(0.2)
            running = self._thread.is_alive()
            for event in self._backlog():
                self.last(event)

    def _work(self) -> None:
        try:
            self.result = self.work(should_stop=lambda: self._request, on_event=self._news.put)
        except BaseException as error:  # `news` raises it in the main thread
            self._error = error


def local_launcher(run: Run, config: Config, *, trains: bool = True, generates: bool = True) -> LocalLauncher:
    """Return a launcher for roles on this machine: for all of them, only for a trainer, or only for roles that
    generate. Raise ConfigError if this machine has too few GPUs for them."""
    ranks = config.training.ranks if trains else 1
    per_engine = config.engine.gpus if generates else 1
    uuids = usable(config, per_engine, ranks)
    return LocalLauncher(run, devices=Devices(run.url, uuids=uuids, ranks=ranks, per_engine=per_engine))


def node_launcher(run: Run, config: Config, ranks: int | None, place: Mapping[str, object]) -> LocalLauncher:
    """Return a launcher for the ranks of one machine of a trainer on several machines (flows/roles/node.py). Without
    `ranks` there is one rank for each GPU of this machine, or a single rank. `place` has the other options of the
    command. Raise ConfigError if this machine has too few GPUs."""
    uuids = usable(config, ranks=ranks or 1)
    ranks = len(uuids) or 1 if ranks is None else ranks
    options = [f"--{name}={value}" for name, value in {**place, "ranks": ranks}.items()]

    def command(role: Role, url: str) -> list[str]:
        return [*module_command("flows.roles.node"), url, *options]

    launcher = LocalLauncher(run, command=command, devices=Devices(run.url, uuids=uuids, ranks=ranks))
    launcher.start_deadline = math.inf  # the lease is that of the trainer: a machine has none of its own
    return launcher
