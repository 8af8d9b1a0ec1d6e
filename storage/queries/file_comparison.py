"""Compares local files with the size and the sha256 in their records."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from storage.local_files.regular_files import sha256_of_file
from storage.local_files.remembered_reads import RememberedReads
from storage.objects.damage import IS_MISSING, Damage
from storage.objects.digests import Digest
from storage.queries.mirror import Snapshot


def verify(
    snapshot: Snapshot, expectations: Mapping[str, Digest], verified: RememberedReads
) -> tuple[frozenset[str], list[Damage]]:
    """Return the keys of the objects that match their records, and the damage of the others. `expectations` are ordered
    from oldest to newest. A copy of a remote object has the start of its sha256 in its name, which is compared. Other
    files are read, newest first, unless their sha256 is remembered. Files beyond the limit of `verified` are compared
    by size alone."""
    problems: dict[str, str] = {}
    for key, expected in expectations.items():
        if problem := _by_size(snapshot, key, expected):
            problems[key] = problem
    fitting = {key: snapshot.files[key] for key in expectations if key not in problems}
    if snapshot.copied:
        digests = {key: path.suffix.removeprefix(".") for key, path in fitting.items()}
    else:
        digests = verified.ask("sha256", fitting, sha256_of_file)
    for key in fitting.keys() - digests.keys():
        if not os.access(fitting[key], os.R_OK):
            problems[key] = "cannot be read" if fitting[key].exists() else IS_MISSING
    for key, digest in digests.items():
        if not expectations[key].sha256.startswith(digest):
            problems[key] = "does not have the content that its record promises (sha256 differs)"
    good = frozenset(expectations.keys() - problems.keys())
    return good, [Damage(key, problem) for key, problem in problems.items()]


def read_whole(
    snapshot: Snapshot,
    keys: Sequence[str],
    kind: str,
    reader: Callable[[Path], dict[str, Any]],
    verified: RememberedReads,
) -> dict[str, dict[str, Any]]:
    """Return, by key, the answer of `reader` about each object for which no record has a digest. The `problem` of an
    answer is empty if the object can be read. `keys` are ordered from oldest to newest. Objects beyond the limit of
    `verified` have no answer."""
    answers = verified.ask(kind, {key: snapshot.files[key] for key in keys}, reader)
    bad = [key for key in keys if key in answers and answers[key]["problem"]]
    if snapshot.copied and bad:
        for key in bad:
            with suppress(FileNotFoundError):
                snapshot.read(key)  # makes a new copy if the copy has been changed
        answers |= verified.ask(kind, {key: snapshot.files[key] for key in bad}, reader)
    return answers


def _by_size(snapshot: Snapshot, key: str, expected: Digest) -> str | None:
    path = snapshot.files.get(key)
    try:
        size = path.stat().st_size if path else None
    except FileNotFoundError:
        size = None
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    if size is None:
        return IS_MISSING
    return None if size == expected.size else f"has {size} bytes, but its record says {expected.size}"
