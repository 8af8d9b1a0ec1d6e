"""Attempts: the lives of a run's trainer. The number of the newest one is the fencing epoch; each says which
checkpoint it continues, so which attempt's ledger counts for which syncs follows from the records alone."""

import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from storage import folders, layout, records
from storage.run import Run
from tba.errors import AlreadyExists, Damaged
from tba.types import Version

_ATTEMPT = re.compile(rf"{layout.ATTEMPTS}(\d{{4,}})\.json")


@dataclass(frozen=True, kw_only=True)
class Attempt:
    number: int
    continues: Version | None  # the checkpoint, by its sync and attempt; None starts from the beginning
    created_at: str


class Span(NamedTuple):
    """The syncs, first and last included, for which the ledger of an attempt counts; `last_sync` None: all later."""

    attempt: int
    first_sync: int
    last_sync: int | None

    def covers(self, sync: int) -> bool:
        return self.first_sync <= sync and (self.last_sync is None or sync <= self.last_sync)


def claim_attempt(run: Run) -> Attempt:
    """Become the newest attempt, continuing the newest complete checkpoint of the chain so far. From then on every
    earlier attempt is superseded."""
    while True:
        spans = chain(run)
        number = spans[-1].attempt + 1 if spans else 1
        continues = newest_checkpoint(run, spans)
        attempt = Attempt(number=number, continues=continues, created_at=records.now())
        try:
            run.store.create(layout.attempt(number), _encode(attempt))
        except AlreadyExists:
            continue  # another trainer was first: look again, it is part of the chain now
        return attempt


def read_attempt(run: Run, number: int) -> Attempt:
    record = records.read(run.store, layout.attempt(number), "continues", "created_at")
    origin = record["continues"]
    continues = Version(origin["sync"], origin["attempt"]) if origin else None
    if continues and continues.attempt >= number:
        raise Damaged(f"{run.url}/{layout.attempt(number)} continues a later attempt, {continues.attempt}")
    return Attempt(number=number, continues=continues, created_at=record["created_at"])


def newest_attempt(run: Run) -> int:
    """0 if there is none."""
    matches = (_ATTEMPT.fullmatch(entry.key) for entry in run.store.list(layout.ATTEMPTS))
    return max((int(match[1]) for match in matches if match), default=0)


def chain(run: Run, attempt: int | None = None) -> list[Span]:
    """The attempts that led to `attempt` (the newest if not given), oldest first, with the syncs of each. An attempt
    that nobody continued is not in it."""
    number = newest_attempt(run) if attempt is None else attempt
    spans: list[Span] = []
    last_sync: int | None = None
    while number:
        origin = read_attempt(run, number).continues
        spans.append(Span(number, origin.number + 1 if origin else 0, last_sync))
        number, last_sync = (origin.attempt, origin.number) if origin else (0, None)
    return spans[::-1]


def newest_checkpoint(run: Run, spans: Sequence[Span]) -> Version | None:
    """The newest complete checkpoint that the chain accepts; those of abandoned attempts do not count."""
    found = folders.complete(run.store, layout.CHECKPOINTS)
    return max((it for it in found if accepts(spans, it)), key=lambda it: it.order, default=None)


def accepts(spans: Sequence[Span], checkpoint: Version) -> bool:
    """Whether a checkpoint lies on the chain."""
    return any(span.attempt == checkpoint.attempt and span.covers(checkpoint.number) for span in spans)


def _encode(attempt: Attempt) -> bytes:
    """With who claimed it, so that two trainers never write the same bytes and each knows whether it won."""
    origin = attempt.continues
    record = {
        "attempt": attempt.number,
        "continues": {"sync": origin.number, "attempt": origin.attempt} if origin else None,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "created_at": attempt.created_at,
    }
    return records.encode(record)
