"""A helper process for work that may take forever, or that needs a process of its own for another reason.

No signal interrupts a power of two long integers, but a process can be killed. So the work is done in a helper, which
is started when first needed. Work that takes too long ends the helper: there is then no answer, and the next order
starts another helper. The limit is on the helper's CPU time, so that the result does not depend on how busy the machine
is. A second limit, on wall-clock time, is for a helper that gets no CPU time.

The helper ends together with the process that started it, however that process ends.
"""

import atexit
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tba.errors import RunFailed
from tba.runtime.child import Child, end_with_parent, module_command
from tba.runtime.messages import receive, send, take_pipes

START_PATIENCE = 120.0  # wall-clock seconds to start, which imports libraries, on a busy machine
MEMORY = 4 << 30  # bytes that a helper may allocate
_SAME_RESULTS = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""The order of sets, which depends on the first variable, decides how sympy solves a problem and which problems
reasoning_gym makes. Threads would only take memory."""


# --- the side that asks -----------------------------------------------------------------------------------------------


class LimitedHelper:
    """The helper process, as seen by the process that owns it. The helper is started at the first `order`, and again
    after it has ended."""

    def __init__(self, what: str, module: str, *arguments: str, patience: float):
        self.what, self.module, self.arguments, self.patience = what, module, arguments, patience
        self.child: Child | None = None
        self._owner = os.getpid()
        self._lock = threading.Lock()
        atexit.register(self.close)

    def order(self, order: Any, *, patience: float | None = None) -> Any:
        """Return the helper's answer to an order; both are JSON. If the helper was killed from outside, ask a new
        helper once more. Return None if there is no answer, for example because the time is over. `patience` is the
        limit on wall-clock time, in seconds, if it differs from that of other orders."""
        with self._lock:
            try:
                return self._first_answer(order, patience or self.patience)
            except BaseException:  # such as Stopped: the next order would read this answer as its own
                self._end()
                raise

    def _first_answer(self, order: Any, patience: float) -> Any:
        for _ in range(2):
            child = self._running()
            with child.killed_after(patience) as overdue:
                child.send(order)
                answer = child.receive()
            if answer is not None:
                return answer[0]
            if self._end() == -signal.SIGPROF or overdue.is_set():
                return None
        return None

    def close(self) -> None:
        if os.getpid() == self._owner:  # in a forked process the helper belongs to the parent
            with self._lock:
                self._end()

    def _running(self) -> Child:
        if self.child and self.child.process.poll() is None:
            return self.child
        self._end()
        command = [*module_command(self.module), *self.arguments]
        self.child = child = Child(self.what, command, env=os.environ | _SAME_RESULTS)
        with child.killed_after(START_PATIENCE):
            is_ready = child.receive() is not None
        if not is_ready:
            raise RunFailed(f"{child.name} did not start: it ended with code {self._end()}")
        return child

    def _end(self) -> int | None:
        """Kill the helper if it still runs, and return its exit code; None if there is no helper."""
        child, self.child = self.child, None
        if child is None:
            return None
        child.process.kill()
        child.close()
        child.stdout.close()
        return child.process.returncode


# --- the helper's side ------------------------------------------------------------------------------------------------


def obey(load: Callable[[], Callable[[Any], Any]]) -> None:
    """Answer orders until there are no more. `load` imports what takes long, and returns the function that answers an
    order."""
    end_with_parent()
    with suppress(ValueError, OSError):  # some systems do not support this limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    orders, answers = take_pipes()
    answer = load()
    send(answers, "ready")
    while (order := receive(orders)) is not None:
        send(answers, answer(order[0]))


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """End this process if the `with` block takes more CPU time than this."""
    signal.setitimer(signal.ITIMER_PROF, seconds)  # no handler: the signal ends the process
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
