"""Describe why a role has ended, from its exit code and the last lines of its log."""

import re
import signal
from contextlib import suppress

from flows.supervision.interfaces import Life
from flows.supervision.processes import FINISHED, STOPPED, SUPERSEDED
from tba.errors import StorageError

ERROR_LINE = re.compile(r"^(?:\S+ \S+ \S+ ERROR|ERROR:?|error:) (.+)$", re.MULTILINE)
"""An error in a log, as roles and most other programs write it."""


def describe_exit(code: int) -> str:
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    known = {FINISHED: "finished", STOPPED: "stopped", SUPERSEDED: "superseded by another life of the role"}
    return known.get(code, f"failed with exit code {code}")


def why_it_ended(life: Life, code: int) -> str:
    """Return the last error in the log of a role that failed, or its last line if there is no error. Return an empty
    string if the role did not fail by itself."""
    if code in (STOPPED, SUPERSEDED) or code <= FINISHED:  # negative codes are signals
        return ""
    words = ""
    with suppress(StorageError):  # the log may be in remote storage
        words = life.last_words()
    last = _error_of(words) or words.rstrip().rpartition("\n")[2]
    return f": {last}" if last else ""


def quote_log(life: Life) -> str:
    """Return the last error in the log of a life, where the life ran, and the last lines of the log."""
    words = life.last_words()
    error = _error_of(words)
    where = f"{error}; {life.where}" if error else life.where
    return f"{where}; the end of its log:\n{words}" if words else f"{where}; its log is empty"


def refusal_in_log(life: Life) -> str:
    """Return the last error in the log of a life, and where the life ran. A role that refuses its settings or data logs
    an error that explains itself. If the log has no error, also return the last lines of the log."""
    error = _error_of(life.last_words())
    return f"{error}; {life.where}" if error else quote_log(life)


def _error_of(words: str) -> str:
    """Return the message of the last error in a log, or an empty string."""
    return next(reversed(ERROR_LINE.findall(words)), "")
