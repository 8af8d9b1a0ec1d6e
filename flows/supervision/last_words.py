"""Why a role has ended, from its exit code and the last lines of its log."""

import re
import signal
from contextlib import suppress

from flows.supervision.life import Life
from flows.supervision.processes import FINISHED, STOPPED, SUPERSEDED
from tba.errors import StorageError

ERROR_LINE = re.compile(r"^(?:\S+ \S+ \S+ ERROR|ERROR:?|error:) (.+)$", re.MULTILINE)  # of a role's log, or another's


def describe_exit(code: int) -> str:
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    known = {FINISHED: "finished", STOPPED: "stopped", SUPERSEDED: "superseded by another life of it"}
    return known.get(code, f"failed with exit code {code}")


def why_it_ended(life: Life, code: int) -> str:
    """What a role that failed says was wrong, or what it said last."""
    if code in (STOPPED, SUPERSEDED) or code <= FINISHED:  # below it are signals
        return ""
    words = ""
    with suppress(StorageError):  # the log may be elsewhere
        words = life.last_words()
    last = _error_of(words) or words.rstrip().rpartition("\n")[2]
    return f": {last}" if last else ""


def quote_log(life: Life) -> str:
    """What it says was wrong, where it lived, and what it wrote last."""
    words = life.last_words()
    error = _error_of(words)
    where = f"{error}; {life.where}" if error else life.where
    return f"{where}; its last words:\n{words}" if words else f"{where}; it wrote nothing"


def refusal_in_log(life: Life) -> str:
    """What it says was wrong, and where it lived: nobody has to look for the cause in what it wrote before."""
    error = _error_of(life.last_words())
    return f"{error}; {life.where}" if error else quote_log(life)


def _error_of(words: str) -> str:
    """The last error in a log, without its time."""
    return next(reversed(ERROR_LINE.findall(words)), "")
