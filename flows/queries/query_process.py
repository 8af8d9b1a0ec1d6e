"""Queries over a run, answered by a process that can be ended: DuckDB neither heeds an interrupt in the midst of a
single value nor survives each query, and no query may hold up or end whoever asks it."""

import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, Queue
from typing import Any

from tba.errors import QueryEnded, TooLong, error_named
from tba.runtime.child import Child, module_command

COMMAND = module_command("flows.queries.query_worker")

_MESSAGES = 16  # that wait until somebody takes them; then the process waits
_HEEDS = 2.0  # seconds for a query to heed an interrupt
_PREPARES = 60.0  # seconds for a database to be made, on a busy machine
_PATIENCE = 10.0  # seconds for a process to be gone that was killed

Tell = Callable[[int, int], None]
Write = Callable[[str], Any]


class QueryProcess:
    """Asks one query at a time. The process starts with the first query, and again after a query that could only be
    ended together with the process. It reads the run when it starts, and `on_start` is called then."""

    def __init__(self, url: str, *, on_start: Callable[[], None] = lambda: None):
        self._url = url
        self._on_start = on_start
        self._child: _Child | None = None
        self._closed = False

    @property
    def is_running(self) -> bool:
        return self._child is not None

    def start(self, progress: Tell | None = None) -> None:
        """Start the process and have it read the run, unless it has."""
        if self._child is None:
            self._child = child = _Child([*COMMAND, "--run", self._url])
            if self._closed:  # perhaps only meanwhile, by another thread
                child.end()
            self._exchange("open", progress=progress)
            self._on_start()

    def refresh(self, progress: Tell | None = None) -> None:
        """Have the run read again. What was read before stays if that fails."""
        if self._child is None:
            self.start(progress)
        else:
            self._exchange("refresh", progress=progress)
            self._on_start()

    def ask(self, what: str, *, seconds: float | None = None, write: Write | None = None, **arguments: Any) -> Any:
        """Give an order of `flows.queries.query_worker` and return its answer. `write` gets the text of the answer,
        piece by piece. TooLong after `seconds`. The process is ended if the query does not heed this limit or a
        Ctrl-C."""
        self.start()
        return self._exchange(what, seconds=seconds, write=write, **arguments)

    def close(self) -> None:
        """End the process, also from another thread while it answers."""
        self._closed = True
        self._end()

    def _exchange(
        self,
        what: str,
        *,
        seconds: float | None = None,
        write: Write | None = None,
        progress: Tell | None = None,
        **arguments: Any,
    ) -> Any:
        child = self._child
        assert child
        try:
            child.order(what, arguments)
            return child.answer(seconds, write or (lambda text: None), progress or (lambda done, total: None))
        except TimeoutError:
            self._stop(child)
            raise TooLong(
                f"it took longer than {seconds:g} seconds (--seconds); ask for less, such as some steps"
            ) from None
        except QueryEnded:
            self._end()
            raise
        except BaseException:
            if child.is_busy:
                self._stop(child)
            raise

    def _stop(self, child: "_Child") -> None:
        """Interrupt what the process does, and end it if that does not help."""
        try:
            is_idle = child.interrupt(_HEEDS)
        except BaseException:  # a second Ctrl-C
            self._end()
            raise
        if not is_idle:
            self._end()

    def _end(self) -> None:
        child, self._child = self._child, None
        if child:
            child.end()


class _Child:
    """One life of the process, and the thread that starts it, reads from it, and lives as long: Linux ends a process
    with the thread that started it."""

    def __init__(self, command: Sequence[str]):
        self.is_busy = False
        self._number = 0
        self._child: Child | None = None
        self._unwanted = False
        self._messages: Queue[dict[str, Any] | OSError | None] = Queue(_MESSAGES)
        threading.Thread(target=self._live, args=(command,), daemon=True).start()
        try:
            first = self._messages.get()
        except BaseException:
            self.end()
            raise
        if isinstance(first, OSError):
            raise QueryEnded(f"the process that answers queries cannot start: {first.strerror}")

    def _live(self, command: Sequence[str]) -> None:
        try:
            self._child = child = Child("query", command)
        except OSError as error:
            self._messages.put(error)
            return
        if self._unwanted:
            child.process.kill()
        self._messages.put({})
        while (message := child.receive()) is not None:
            self._messages.put(message[0])
        child.stdout.close()
        child.process.wait()
        self._messages.put(None)

    def order(self, what: str, arguments: dict[str, Any]) -> None:
        self._number += 1
        self.is_busy = True
        self._send({"n": self._number, "do": what, "with": arguments})

    def _send(self, order: dict[str, Any]) -> None:
        assert self._child
        with suppress(ValueError):  # its pipe was closed, as its answer will say
            self._child.send(order)

    def answer(self, seconds: float | None, write: Write, progress: Tell) -> Any:
        """Take messages until the last of this order. TimeoutError when so many seconds have passed since the query
        began: it may wait for a database that is being made."""
        end = None if seconds is None else time.monotonic() + seconds + _PREPARES
        while True:
            message = self._next(end)
            if "begun" in message:
                end = None if seconds is None else time.monotonic() + seconds
            elif "text" in message:
                write(message["text"])
            elif "progress" in message:
                progress(*message["progress"])
            elif "error" in message:
                self.is_busy = False
                raise error_named(message["error"], message["says"])
            else:
                self.is_busy = False
                return message["is"]

    def _next(self, end: float | None) -> dict[str, Any]:
        try:
            message = self._messages.get(timeout=None if end is None else max(0.0, end - time.monotonic()))
        except Empty:
            raise TimeoutError from None
        if not isinstance(message, dict):
            self._messages.put(None)
            assert self._child
            raise QueryEnded(f"the query ended the process that answers queries ({self._child.how_ended()})")
        return message

    def interrupt(self, seconds: float) -> bool:
        """Interrupt the order, and return whether it is over within so many seconds."""
        end = time.monotonic() + seconds
        self._send({"n": self._number, "do": "interrupt"})
        with suppress(TimeoutError, QueryEnded):
            while self.is_busy:
                message = self._next(end)
                self.is_busy = not message.keys() & {"is", "error"}
        return not self.is_busy

    def end(self) -> None:
        self._unwanted = True
        if self._child is None:
            return
        self._child.process.kill()
        self._child.release()
        with suppress(Empty, QueryEnded, TimeoutError):
            while True:  # the thread may wait for room
                self._next(time.monotonic() + _PATIENCE)


def print_answer(queries: QueryProcess, query: str, form: str, *, must_have_rows: bool = False) -> None:
    """Print the rows of the last statement, as they come."""
    width = shutil.get_terminal_size((160, 40)).columns
    queries.ask(
        "write",
        query=query,
        form=form,
        width=width,
        path=None,
        must_have_rows=must_have_rows,
        write=sys.stdout.write,
    )
