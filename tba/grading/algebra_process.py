"""Algebra in a separate process that can be killed: `python -m tba.grading.algebra_process`, started when first needed.

Deciding whether two expressions are equal may take forever, and no signal interrupts a power of two long integers. So
each process that grades has a helper. A comparison that takes too long ends the helper: the answer then counts as
wrong, and the next comparison starts another helper. The limit is on the helper's CPU time, so that the result does not
depend on how busy the machine is. A second limit, on wall-clock time, is for a helper that gets no CPU time.

The helper ends together with the process that started it, however that process ends.
"""

import atexit
import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, lru_cache

from tba.errors import RunFailed
from tba.runtime.child import Child, end_with_parent, module_command
from tba.runtime.messages import receive, send, take_pipes

SECONDS = 2.0  # CPU time of the helper for one comparison
PATIENCE = 20.0  # wall-clock seconds for one comparison
START_PATIENCE = 120.0  # wall-clock seconds to start, which imports sympy, on a busy machine
MEMORY = 4 << 30  # bytes that the helper may allocate
LONGEST = 1 << 15  # bytes of an order; longer ones are not compared


# --- the side that grades ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=16_384)  # responses to one prompt often have the same answer
def equal(given: str, gold: str) -> bool:
    """True if two expressions, in LaTeX or plain text, are equal. False if this cannot be decided in time."""
    return _helper(os.getpid()).ask("equal", given, gold)


@lru_cache(maxsize=16_384)
def close(given: str, gold: str) -> bool:
    """True if two expressions are equal, or if they are numbers that differ by at most 0.001. False if this cannot be
    decided in time."""
    return _helper(os.getpid()).ask("close", given, gold)


@lru_cache(maxsize=16_384)
def verified(given: str, gold: str) -> bool:
    """True if the library math-verify accepts an answer in LaTeX. False if it does not decide in time."""
    return _helper(os.getpid()).ask("verified", given, gold)


class Helper:
    """The helper process, as seen by the process that owns it. The helper is started at the first `ask`, and again
    after it has ended."""

    def __init__(self, *, seconds: float = SECONDS, patience: float = PATIENCE):
        self.seconds, self.patience = seconds, patience
        self.child: Child | None = None
        self._owner = os.getpid()
        self._lock = threading.Lock()
        atexit.register(self.close)

    def ask(self, what: str, given: str, gold: str) -> bool:
        """Return the result of a comparison. If the helper was killed from outside, ask a new helper once more.
        Return False if there is no result, for example because the time is over or the texts are too long."""
        order = [what, given, gold]
        if len(json.dumps(order)) >= LONGEST:
            return False
        with self._lock:
            try:
                return self._first_answer(order)
            except BaseException:  # such as Stopped: the next comparison would read this answer as its own
                self._end()
                raise

    def _first_answer(self, order: Sequence[str]) -> bool:
        for _ in range(2):
            child = self._running()
            with child.killed_after(self.patience) as overdue:
                child.send(order)
                answer = child.receive()
            if answer is not None:
                return answer[0]
            if self._end() == -signal.SIGPROF or overdue.is_set():
                return False
        return False

    def close(self) -> None:
        if os.getpid() == self._owner:  # in a forked process the helper belongs to the parent
            with self._lock:
                self._end()

    def _running(self) -> Child:
        if self.child and self.child.process.poll() is None:
            return self.child
        self._end()
        command = [*module_command("tba.grading.algebra_process"), str(self.seconds)]
        environment = os.environ | {"PYTHONHASHSEED": "0"}  # how sympy solves a problem depends on it
        self.child = child = Child("the helper that compares answers", command, env=environment)
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


@cache
def _helper(pid: int) -> Helper:
    """Return this process's helper. The process id is the cache key, so a forked process gets its own."""
    return Helper()


# --- the helper's side ------------------------------------------------------------------------------------------------


def main(seconds: float) -> None:
    end_with_parent()
    with suppress(ValueError, OSError):  # some systems do not support this limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    orders, answers = take_pipes()

    from tba.grading import symbolic_equality  # imports sympy, which takes a second

    send(answers, "ready")
    while (order := receive(orders)) is not None:
        what, given, gold = order[0]
        signal.setitimer(signal.ITIMER_PROF, seconds)  # no handler: the signal ends the process
        right = symbolic_equality.answer(what, given, gold)
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(answers, bool(right))


if __name__ == "__main__":
    main(float(sys.argv[1]))
