"""The checkers in a helper process that can be killed: `python -m tba.tasks.instructions.checker_process`, started when
the first response is checked.

Checkers search responses with regular expressions, some of which take time that grows with the square of a response's
length, and published prompts bring expressions of their own. So a response whose check takes too long has no result.
"""

import json
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from tba.errors import ConfigError
from tba.runtime.limited_helper import LimitedHelper, cpu_limit, obey
from tba.tasks.instructions.constraints import Constraint

SECONDS = 5.0  # CPU time of the helper to check one response; most take less than a millisecond
PATIENCE = 60.0  # wall-clock seconds to check one response
LONGEST = 1 << 22  # bytes of an order; longer ones are not checked


# --- the side that asks -----------------------------------------------------------------------------------------------


class CheckerProcess:
    """The helper process, as seen by the process that owns it."""

    def __init__(self, *, seconds: float = SECONDS, patience: float = PATIENCE):
        what = "the process that checks instructions"
        self.helper = LimitedHelper(what, "tba.tasks.instructions.checker_process", str(seconds), patience=patience)

    def check(self, constraints: Sequence[Constraint], response: str, *, loosely: bool = False) -> list[bool] | None:
        """Return, for each constraint, whether a response keeps it. Return None if this cannot be decided in time, or
        if the response is too long. Raise ConfigError if a constraint cannot be checked on this machine."""
        order = ["holds_loosely" if loosely else "holds", constraints, response]
        reply = self.helper.order(order) if len(json.dumps(order)) < LONGEST else None
        if reply is None:
            return None
        if "refused" in reply:
            raise ConfigError(reply["refused"])
        if "failed" in reply:
            raise OSError(f"{self.helper.what} failed: {reply['failed']}")
        return reply["is"]

    def close(self) -> None:
        self.helper.close()


@cache
def shared() -> CheckerProcess:
    """Return the helper that all tasks of this process share."""
    return CheckerProcess()


# --- the helper's side ------------------------------------------------------------------------------------------------


def main(seconds: float) -> None:
    def load() -> Callable[[Sequence[Any]], Any]:
        from tba.tasks.instructions import checkers

        ways = {"holds": checkers.holds, "holds_loosely": checkers.holds_loosely}
        trimmed = checkers.library().trimmed  # imports the library, which takes seconds

        def check(order: Sequence[Any]) -> Any:
            way, constraints, response = order
            try:
                with cpu_limit(seconds):
                    text = trimmed(response)
                    return {"is": [ways[way](Constraint(*constraint), text) for constraint in constraints]}
            except ConfigError as error:
                return {"refused": str(error)}
            except MemoryError:  # the helper may take much, so it is the text that needs too much
                return None
            except OSError as error:
                return {"failed": f"{type(error).__name__}: {error}"}

        return check

    obey(load)


if __name__ == "__main__":
    main(float(sys.argv[1]))
