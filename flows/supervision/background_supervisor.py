"""A supervisor in a thread of its own, for whoever has other work meanwhile."""

import contextvars
import threading
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Protocol, Self

from flows.supervision.gpus import Devices, usable
from flows.supervision.life import Event, StopRequest
from flows.supervision.processes import LocalLauncher
from storage.runs.run import Run
from tba.config import Config

REASONS = {
    "KeyboardInterrupt": "interrupted",
    "SystemExit": "terminated",
    "TerminationSignal": "cancelled from Prefect",
}
"""Why work is stopped, by the exception that left its context."""


class Work(Protocol):
    """`supervise`, or `one_life.watch_one`, with everything but its callbacks."""

    def __call__(self, *, should_stop: Callable[[], StopRequest | None], on_event: Callable[[Event], None]) -> Any: ...


class Background:
    """Work in a thread, as a context. The main thread tells what happens; a signal that reaches it, or a server that
    is slow to hear about it, cannot catch the work halfway. Leaving the context by an exception stops the work in
    order first, `within` so many seconds if somebody will end this process then; `last` hears what happens meanwhile.
    """

    def __init__(self, work: Work, *, within: float | None = None, last: Callable[[Event], None] = lambda event: None):
        self.work, self.within, self.last = work, within, last
        self.result: Any = None
        self._news: SimpleQueue[Event] = SimpleQueue()
        self._request: StopRequest | None = None
        self._error: BaseException | None = None
        context = contextvars.copy_context()  # Prefect knows by it which flow run this is
        self._thread = threading.Thread(target=context.run, args=(self._work,), name="supervisor", daemon=True)

    def stop(self, why: str) -> None:
        self._request = self._request or StopRequest(why, self.within)

    def news(self, every: float = 0.5) -> Iterator[Event | None]:
        """What happens until the work is done, and None now and then. Raises what ended the work."""
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
        except BaseException as error:  # it belongs to whoever waits for the work
            self._error = error


def local_launcher(run: Run, config: Config, *, trains: bool = True, generates: bool = True) -> LocalLauncher:
    """For all roles, for a trainer alone, or for roles that generate. ConfigError if the GPUs of this machine are too
    few."""
    ranks = config.training.ranks if trains else 1
    per_engine = config.engine.gpus if generates else 1
    uuids = usable(config, per_engine, ranks)
    return LocalLauncher(run, devices=Devices(run.url, uuids=uuids, ranks=ranks, per_engine=per_engine))
