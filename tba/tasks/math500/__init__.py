r"""Fingerprints of MATH-500: 500 problems of MATH that are used for evaluation only. With the fingerprints, the
repository needs no copy of the problems.

This command makes the list of fingerprints from the JSON lines of MATH-500:

    python -c "from tba.tasks.math500 import listed; print(listed(open('test.jsonl')), end='')" \
        > tba/tasks/math500/fingerprints.txt
"""

import hashlib
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path


def is_held_out(problem: str) -> bool:
    return fingerprint(problem) in _fingerprints()


def fingerprint(problem: str) -> str:
    """Return a fingerprint of a problem, which has 32 bits. It does not depend on white space, in which copies of the
    dataset differ. About one in eight million other problems has the same fingerprint as one of the 500."""
    return hashlib.sha256("".join(problem.split()).encode()).hexdigest()[:8]


def listed(lines: Iterable[str]) -> str:
    return "".join(f"{fingerprint(json.loads(line)['problem'])}\n" for line in lines)


@cache
def _fingerprints() -> frozenset[str]:
    return frozenset(Path(__file__).with_name("fingerprints.txt").read_text().split())
