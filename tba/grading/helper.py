"""Algebra in a process of its own, which can be ended: `python -m tba.grading.helper`, started when first needed.

Whether two expressions are equal may take for ever to find out, and no signal interrupts a power of two long integers.
So each process that grades has a helper, and a comparison that takes longer than it may ends it: the answer is wrong,
and the next comparison finds another helper. The limit is on the helper's own time of the processor, so that what is
right does not depend on how busy the machine is; a second one, on the clock, is for a helper that gets none.

The process ends with the one that started it, however that ends.
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

SECONDS = 2.0  # of the processor, for one comparison
PATIENCE = 20.0  # seconds of the clock, likewise
START_PATIENCE = 120.0  # to import sympy, on a busy machine
MEMORY = 4 << 30  # bytes that the helper may ask for
LONGEST = 1 << 15  # bytes of the longest comparison that is made


# --- the side that grades ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=16_384)  # the responses of one prompt repeat each other's answers
def equal(given: str, gold: str) -> bool:
    """Whether two expressions, in LaTeX or as one types them, are the same; False if it does not show in time."""
    return _helper(os.getpid()).ask("equal", given, gold)


@lru_cache(maxsize=16_384)
def close(given: str, gold: str) -> bool:
    """Likewise, or numbers that a thousandth at most lies between."""
    return _helper(os.getpid()).ask("close", given, gold)


@lru_cache(maxsize=16_384)
def verified(given: str, gold: str) -> bool:
    """What the library math-verify says of two answers in LaTeX; False if it does not say so in time."""
    return _helper(os.getpid()).ask("verified", given, gold)


class Helper:
    """Starts when it is first asked, and again after each of its ends."""

    def __init__(self, *, seconds: float = SECONDS, patience: float = PATIENCE):
        self.seconds, self.patience = seconds, patience
        self.child: Child | None = None
        self._owner = os.getpid()
        self._lock = threading.Lock()
        atexit.register(self.close)

    def ask(self, what: str, given: str, gold: str) -> bool:
        """A helper that somebody else has ended is replaced and asked again, once."""
        order = [what, given, gold]
        if len(json.dumps(order)) >= LONGEST:
            return False
        with self._lock:
            try:
                return self._first_answer(order)
            except BaseException:  # a stop, say: the answer would be read as that of the next comparison
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
        if os.getpid() == self._owner:  # a fork of the process has no helper of its own to end
            with self._lock:
                self._end()

    def _running(self) -> Child:
        if self.child and self.child.process.poll() is None:
            return self.child
        self._end()
        command = [*module_command("tba.grading.helper"), str(self.seconds)]
        environment = os.environ | {"PYTHONHASHSEED": "0"}  # sympy's ways through a problem depend on the hash seed
        self.child = child = Child("the helper that compares answers", command, env=environment)
        with child.killed_after(START_PATIENCE):
            is_ready = child.receive() is not None
        if not is_ready:
            raise RunFailed(f"{child.name} did not start: it ended with code {self._end()}")
        return child

    def _end(self) -> int | None:
        """The exit code of the process, which is ended if it still runs."""
        child, self.child = self.child, None
        if child is None:
            return None
        child.process.kill()
        child.close()
        child.stdout.close()
        return child.process.returncode


@cache
def _helper(pid: int) -> Helper:
    """One for each process: a fork leaves its parent's alone."""
    return Helper()


# --- the helper's side ------------------------------------------------------------------------------------------------


def main(seconds: float) -> None:
    end_with_parent()
    with suppress(ValueError, OSError):  # not everywhere
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    orders, answers = take_pipes()

    from tba.grading import algebra  # sympy, which takes a second to import

    send(answers, "ready")
    while (order := receive(orders)) is not None:
        what, given, gold = order[0]
        signal.setitimer(signal.ITIMER_PROF, seconds)  # nobody handles it: it ends the process
        right = algebra.answer(what, given, gold)
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(answers, bool(right))


if __name__ == "__main__":
    main(float(sys.argv[1]))
