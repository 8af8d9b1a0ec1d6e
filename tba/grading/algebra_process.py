"""Algebra in a separate process that can be killed: `python -m tba.grading.algebra_process`, started when first needed.

Deciding whether two expressions are equal may take forever. So each process that grades has a helper
(`tba.runtime.limited_helper`): an answer whose comparison takes too long counts as wrong.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache, lru_cache

from tba.runtime.limited_helper import LimitedHelper, cpu_limit, obey

SECONDS = 2.0  # CPU time of the helper for one comparison
PATIENCE = 20.0  # wall-clock seconds for one comparison
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


class Helper(LimitedHelper):
    """The helper process, as seen by the process that owns it."""

    def __init__(self, *, seconds: float = SECONDS, patience: float = PATIENCE):
        what = "the helper that compares answers"
        super().__init__(what, "tba.grading.algebra_process", str(seconds), patience=patience)

    def ask(self, what: str, given: str, gold: str) -> bool:
        """Return the result of a comparison. Return False if there is no result, for example because the time is over
        or the texts are too long."""
        order = [what, given, gold]
        return len(json.dumps(order)) < LONGEST and bool(self.order(order))


@cache
def _helper(pid: int) -> Helper:
    """Return this process's helper. The process id is the cache key, so a forked process gets its own."""
    return Helper()


# --- the helper's side ------------------------------------------------------------------------------------------------


def main(seconds: float) -> None:
    def load() -> Callable[[Sequence[str]], bool]:
        from tba.grading import symbolic_equality  # imports sympy, which takes a second

        def compare(order: Sequence[str]) -> bool:
            with cpu_limit(seconds):
                return bool(symbolic_equality.answer(*order))

        return compare

    obey(load)


if __name__ == "__main__":
    main(float(sys.argv[1]))
