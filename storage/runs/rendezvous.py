"""The rendezvous of an attempt: where the ranks of a trainer meet that is spread over several processes.

Rank 0, the trainer, writes the record once, after it has claimed its attempt. A rank that looks for rank 0 reads the
record of the newest attempt only, so nobody joins an attempt that is superseded.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from storage import layout
from storage.objects import records
from storage.runs.attempts import newest_attempt
from storage.runs.run import Run
from tba.errors import Damaged, Missing


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    attempt: int
    address: str  # the name or address of rank 0's machine, as the other ranks reach it
    port: int
    size: int  # number of ranks
    token: str  # a random name of this group of ranks. It is no secret.
    created_at: str


def announce(run: Run, rendezvous: Rendezvous) -> None:
    """Store the record of an attempt. Raise AlreadyExists if the attempt has one."""
    run.store.create(layout.rendezvous(rendezvous.attempt), records.encode(asdict(rendezvous)))


def find_rendezvous(run: Run, attempt: int) -> Rendezvous | None:
    """Return the record of an attempt; None if the attempt has none. Raise Damaged if the record cannot be read."""
    key = layout.rendezvous(attempt)
    try:
        return decode(run.store.read(key), f"{run.url}/{key}", attempt)
    except Missing:
        return None


def newest_rendezvous(run: Run) -> Rendezvous | None:
    """Return the record of the newest attempt; None if that attempt has none, or none yet."""
    newest = newest_attempt(run)
    return find_rendezvous(run, newest) if newest else None


def decode(data: bytes, name: str, attempt: int) -> Rendezvous:
    """Decode the record of this attempt. Raise Damaged, naming the object, if the bytes are not its record."""
    record = records.decode(data, name, "attempt", "address", "port", "size", "token", "created_at")
    with records.reading(name):
        rendezvous = records.known(Rendezvous, record)
    if rendezvous.attempt != attempt:
        raise Damaged(f"{name} is the record of another attempt, {rendezvous.attempt}")
    return rendezvous


def most_ranks(run: Run) -> int:
    """Return the largest number of ranks that any recorded attempt of a run has had; 1 if no attempt is recorded."""
    return max((it.size for it in _all(run)), default=1)


def _all(run: Run) -> Iterator[Rendezvous]:
    for entry in run.store.list(layout.RENDEZVOUS):
        if attempt := layout.parse_rendezvous(entry.key):
            yield decode(run.store.read(entry.key), f"{run.url}/{entry.key}", attempt)
