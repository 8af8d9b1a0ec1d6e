"""Runs a command in its own terminal, as a person would: tests type keys and read the screen."""

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

_TAKE_THE_TERMINAL = "import os, sys; os.close(os.open(os.ttyname(0), os.O_RDWR)); os.execvp(sys.argv[1], sys.argv[1:])"
"""A program that makes the terminal its own: Ctrl-C reaches the session leader that opened the terminal."""


class Terminal:
    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str], deadline: float = 60.0):
        self.deadline = deadline
        self._keys, screen = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _TAKE_THE_TERMINAL, *command],
            stdin=screen,
            stdout=screen,
            stderr=screen,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "120", **environment},
        )
        os.close(screen)
        self.seen = ""

    def type(self, keys: str, *, until: str) -> str:
        """Type keys, and return the output from then on, up to and including `until`."""
        os.write(self._keys, keys.encode())
        return self._read(until, self.deadline)

    def press(self, key: str, *, until: str) -> str:
        """Do the same as `type`, but press the key again while nothing happens: readline may miss a Ctrl-C between two
        keys."""
        end = time.monotonic() + self.deadline
        while True:
            os.write(self._keys, key.encode())
            try:
                return self._read(until, 2.0)
            except TimeoutError:
                if time.monotonic() > end:
                    raise

    def read(self, until: str) -> str:
        return self._read(until, self.deadline)

    def _read(self, until: str, seconds: float) -> str:
        end = time.monotonic() + seconds
        while until not in self.seen:
            ready, _, _ = select.select([self._keys], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError(f"{until!r} did not come within {seconds:g} s, only {self.seen!r}")
            try:
                self.seen += os.read(self._keys, 65536).decode(errors="replace")
            except OSError:  # no process has the terminal open any more
                raise AssertionError(f"{until!r} did not come before the end, only {self.seen!r}") from None
        found, _, self.seen = self.seen.partition(until)
        return found + until

    def end(self) -> int:
        """Wait until the command ends by itself, and return its exit code."""
        return self.process.wait(self.deadline)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._keys)
