"""Run queries in a separate process that can be killed. DuckDB ignores an interrupt while it computes a single value,
and some queries crash it. Neither may block or end the program that asks."""

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

_MESSAGES = 16  # how many unread messages are queued before the process has to wait
_HEEDS = 2.0  # seconds that a query has to react to an interrupt
_PREPARES = 60.0  # seconds that the creation of a database may take on a busy machine
_PATIENCE = 10.0  # seconds that a killed process has to end

Tell = Callable[[int, int], None]
Write = Callable[[str], Any]


class QueryProcess:
    """Runs one query at a time in a child process. The process starts with the first query, and again after a query
    that could only be ended by killing the process. It reads the run when it starts and at each `refresh`. `on_start`
    is called after each of these reads."""

    def __init__(self, url: str, *, on_start: Callable[[], None] = lambda: None):
        self._url = url
        self._on_start = on_start
        self._child: _Child | None = None
        self._closed = False

    @property
    def is_running(self) -> bool:
        return self._child is not None

    def start(self, progress: Tell | None = None) -> None:
        """Start the process, which then reads the run. Do nothing if the process is running already."""
        if self._child is None:
            self._child = child = _Child([*COMMAND, "--run", self._url])
            if self._closed:  # another thread may have called `close` just now
                child.end()
            self._exchange("open", progress=progress)
            self._on_start()

    def refresh(self, progress: Tell | None = None) -> None:
        """Make the process read the run again. If reading fails, raise the error; what the process read before stays in
        use."""
        if self._child is None:
            self.start(progress)
        else:
            self._exchange("refresh", progress=progress)
            self._on_start()

    def ask(self, what: str, *, seconds: float | None = None, write: Write | None = None, **arguments: Any) -> Any:
        """Send an order to the query process: `what` names an order of `flows.queries.query_worker`, and `arguments`
        are its arguments. Return the answer. If the answer comes as text, `write` is called with each piece of it.
        Raise TooLong if the query takes more than `seconds`. If the query does not end when it is interrupted, by this
        limit or by Ctrl-C, the process is killed."""
        self.start()
        return self._exchange(what, seconds=seconds, write=write, **arguments)

    def close(self) -> None:
        """Kill the process. Another thread may call this while a query is running."""
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
                f"the query took longer than {seconds:g} seconds (--seconds): ask for less, such as fewer steps"
            ) from None
        except QueryEnded:
            self._end()
            raise
        except BaseException:
            if child.is_busy:
                self._stop(child)
            raise

    def _stop(self, child: "_Child") -> None:
        """Interrupt the query, and kill the process if it does not react."""
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
    """One child process, with a thread that starts it and reads its messages. The thread lives as long as the process,
    because Linux kills the process when the thread that started it ends."""

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
        with suppress(ValueError):  # the pipe was closed; `answer` reports this
            self._child.send(order)

    def answer(self, seconds: float | None, write: Write, progress: Tell) -> Any:
        """Read messages until the answer to the current order arrives, and return it. Raise TimeoutError if the query
        runs longer than `seconds`. The time that it takes to create a database for the query does not count, up to
        `_PREPARES` seconds."""
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
        """Interrupt the current order. Return True if the order ends within `seconds`."""
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
            while True:  # empty the queue, since the thread may wait to put a message
                self._next(time.monotonic() + _PATIENCE)


def print_answer(queries: QueryProcess, query: str, form: str, *, must_have_rows: bool = False) -> None:
    """Print the rows of the query's last statement as they arrive. `form` is `table`, `csv` or `json`."""
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
