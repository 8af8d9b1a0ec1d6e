"""Algebra in a process of its own, which can be ended: `python -m tba.grading.helper`, started when first needed.

Whether two expressions are equal may take for ever to find out, and no signal interrupts a power of two long integers.
So each process that grades has a helper, and a comparison that takes longer than it may ends it: the answer is wrong,
and the next comparison finds another helper. The limit is on the helper's own time of the processor, so that what is
right does not depend on how busy the machine is; a second one, on the clock, is for a helper that gets none.

Orders are lines of JSON, answers one digit. The process ends with the one that started it, however that ends.
"""

import atexit
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import cache, lru_cache

from tba.errors import RunFailed
from tba.runtime.child import end_with_parent, start_child

SECONDS = 2.0  # of the processor, for one comparison
PATIENCE = 20.0  # seconds of the clock, likewise
START_PATIENCE = 120.0  # to import sympy, on a busy machine
MEMORY = 4 << 30  # bytes that the helper may ask for
LONGEST = 1 << 15  # bytes of an order: a pipe takes as many while its reader is busy

_READY, _RIGHT, _WRONG = b"+\n", b"1\n", b"0\n"


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
        self.process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._lock = threading.Lock()
        atexit.register(self.close)

    def ask(self, what: str, given: str, gold: str) -> bool:
        """A helper that somebody else has ended is replaced and asked again, once."""
        order = json.dumps([what, given, gold]).encode() + b"\n"
        if len(order) > LONGEST:
            return False
        with self._lock:
            try:
                return self._first_answer(order)
            except BaseException:  # a stop, say: the answer would be read as that of the next comparison
                self._end()
                raise

    def _first_answer(self, order: bytes) -> bool:
        for _ in range(2):
            process = self._running()
            assert process.stdin
            with suppress(BrokenPipeError):
                os.write(process.stdin.fileno(), order)
            answer = _read(process, len(_RIGHT), self.patience)
            if answer in (_RIGHT, _WRONG):
                return answer == _RIGHT
            if self._end() == -signal.SIGPROF or answer is None:
                return False
        return False

    def close(self) -> None:
        if os.getpid() == self._owner:  # a fork of the process has no helper of its own to end
            with self._lock:
                self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self.process and self.process.poll() is None:
            return self.process
        self._end()
        command = [sys.executable, "-P", "-m", "tba.grading.helper", str(self.seconds)]
        # sympy's ways through a problem depend on the hash seed
        self.process = start_child(command, bufsize=0, env=os.environ | {"PYTHONHASHSEED": "0"})
        if _read(self.process, len(_READY), START_PATIENCE) != _READY:
            pid, code = self.process.pid, self._end()
            raise RunFailed(f"the helper that compares answers (pid {pid}) did not start: it ended with code {code}")
        return self.process

    def _end(self) -> int | None:
        """The exit code of the process, which is ended if it still runs."""
        process, self.process = self.process, None
        if process is None:
            return None
        assert process.stdin and process.stdout
        with suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
        process.kill()
        return process.wait()


@cache
def _helper(pid: int) -> Helper:
    """One for each process: a fork leaves its parent's alone."""
    return Helper()


def _read(process: subprocess.Popen[bytes], size: int, patience: float) -> bytes | None:
    """So many bytes; fewer at the end of the pipe, None if they do not come in time."""
    assert process.stdout
    poll, deadline, read = select.poll(), time.monotonic() + patience, b""
    poll.register(process.stdout, select.POLLIN)
    while len(read) < size:
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return None
        more = os.read(process.stdout.fileno(), size - len(read))
        if not more:
            return read
        read += more
    return read


# --- the helper's side ------------------------------------------------------------------------------------------------


def main(seconds: float) -> None:
    end_with_parent()
    with suppress(ValueError, OSError):  # not everywhere
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    orders, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    os.dup2(2, 1)  # whatever prints does so on standard error

    from tba.grading import algebra  # sympy, which takes a second to import

    os.write(answers, _READY)
    for order in orders:
        what, given, gold = json.loads(order)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # nobody handles it: it ends the process
        right = algebra.answer(what, given, gold)
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(answers, _RIGHT if right else _WRONG)


if __name__ == "__main__":
    main(float(sys.argv[1]))
