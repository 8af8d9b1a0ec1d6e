"""Algebra in a separate process that can be killed: `python -m tba.grading.helper`, started when first needed.

It may take forever to decide whether two expressions are equal, and no signal interrupts a power of two long integers.
So each process that grades has a helper. A comparison that takes too long ends the helper: the answer is then wrong,
and the next comparison starts another helper. The limit is on the helper's CPU time, so that the result does not depend
on how busy the machine is. A second limit, on wall-clock time, is for a helper that gets no CPU time.

Orders are lines of JSON, and each answer is one digit. The helper ends together with the process that started it,
however that process ends.
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

SECONDS = 2.0  # CPU time of the helper for one comparison
PATIENCE = 20.0  # wall-clock seconds for one comparison
START_PATIENCE = 120.0  # wall-clock seconds to start, which imports sympy, on a busy machine
MEMORY = 4 << 30  # bytes that the helper may allocate
LONGEST = 1 << 15  # bytes of an order: a pipe holds this many while its reader is busy

_READY, _RIGHT, _WRONG = b"+\n", b"1\n", b"0\n"


# --- the side that grades ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=16_384)  # responses to one prompt often have the same answer
def equal(given: str, gold: str) -> bool:
    """True if two expressions, in LaTeX or plain text, are equal. False if this cannot be decided in time."""
    return _helper(os.getpid()).ask("equal", given, gold)


@lru_cache(maxsize=16_384)
def close(given: str, gold: str) -> bool:
    """True if two expressions are equal, or are numbers that differ by at most 0.001. False if not decided in time."""
    return _helper(os.getpid()).ask("close", given, gold)


@lru_cache(maxsize=16_384)
def verified(given: str, gold: str) -> bool:
    """True if the library math-verify accepts an answer in LaTeX. False if it does not decide in time."""
    return _helper(os.getpid()).ask("verified", given, gold)


class Helper:
    """The helper process as its owner sees it. The process is started at the first `ask`, and again after it has
    ended."""

    def __init__(self, *, seconds: float = SECONDS, patience: float = PATIENCE):
        self.seconds, self.patience = seconds, patience
        self.process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._lock = threading.Lock()
        atexit.register(self.close)

    def ask(self, what: str, given: str, gold: str) -> bool:
        """Return the result of a comparison. If somebody else has killed the helper, ask a new one once more."""
        order = json.dumps([what, given, gold]).encode() + b"\n"
        if len(order) > LONGEST:
            return False
        with self._lock:
            try:
                return self._first_answer(order)
            except BaseException:  # such as Stopped: the next comparison would read this answer as its own
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
        if os.getpid() == self._owner:  # in a forked process the helper belongs to the parent
            with self._lock:
                self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self.process and self.process.poll() is None:
            return self.process
        self._end()
        command = [sys.executable, "-P", "-m", "tba.grading.helper", str(self.seconds)]
        # how sympy solves a problem depends on the hash seed
        self.process = start_child(command, bufsize=0, env=os.environ | {"PYTHONHASHSEED": "0"})
        if _read(self.process, len(_READY), START_PATIENCE) != _READY:
            pid, code = self.process.pid, self._end()
            raise RunFailed(f"the helper that compares answers (pid {pid}) did not start: it ended with code {code}")
        return self.process

    def _end(self) -> int | None:
        """Kill the helper if it still runs, and return its exit code; None if there is no helper."""
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
    """Return the helper of a process. A forked process gets its own helper."""
    return Helper()


def _read(process: subprocess.Popen[bytes], size: int, patience: float) -> bytes | None:
    """Return `size` bytes, or fewer if the pipe ends, or None if they do not arrive in time."""
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
    with suppress(ValueError, OSError):  # some systems do not support this limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    orders, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    os.dup2(2, 1)  # prints go to standard error

    from tba.grading import algebra  # imports sympy, which takes a second

    os.write(answers, _READY)
    for order in orders:
        what, given, gold = json.loads(order)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # no handler: the signal ends the process
        right = algebra.answer(what, given, gold)
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(answers, _RIGHT if right else _WRONG)


if __name__ == "__main__":
    main(float(sys.argv[1]))
