"""Attempts: the lives of a run's trainer.

A trainer stops when an attempt with a higher number than its own exists. The record of each attempt says which
checkpoint the attempt continues. So the records alone determine the chain of attempts that led to the newest attempt:
for each sync, the attempt whose ledger counts.
"""

import os
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from storage import layout
from storage.objects import manifest_folders, records
from storage.objects.damage import IS_MISSING, DamageLog
from storage.runs.run import Run
from tba.errors import Damaged
from tba.types import Version

_GUESSED = "; what the attempt continues is taken from where its ledger begins"


@dataclass(frozen=True, kw_only=True)
class Attempt:
    number: int
    continues: Version | None  # sync and attempt of the checkpoint; None if the attempt starts from the beginning
    created_at: str
    previous_sha256: str | None = None  # sha256 of the previous attempt's record; None for the first, and in older runs


class Span(NamedTuple):
    """The syncs, first and last included, for which the ledger of an attempt counts. If `last_sync` is None, the span
    has no end."""

    attempt: int
    first_sync: int
    last_sync: int | None

    def covers(self, sync: int) -> bool:
        return self.first_sync <= sync and (self.last_sync is None or sync <= self.last_sync)


def read_attempt(run: Run, number: int) -> Attempt:
    key = layout.attempt(number)
    return decode(run.store.read(key), f"{run.url}/{key}", number)


def decode(data: bytes, name: str, number: int) -> Attempt:
    """Decode the record of attempt `number`. Raise Damaged, naming the object, if the bytes are not its record."""
    record = records.decode(data, name, "continues", "created_at")
    with records.reading(name):
        origin = record["continues"]
        continues = Version(int(origin["sync"]), int(origin["attempt"])) if origin else None
    if record.get("attempt", number) != number:
        raise Damaged(f"{name} is the record of another attempt, {record['attempt']!r:.20}")
    if continues and continues.attempt >= number:
        raise Damaged(f"{name} continues a later attempt, {continues.attempt}")
    return Attempt(
        number=number,
        continues=continues,
        created_at=record["created_at"],
        previous_sha256=record.get("previous_sha256"),
    )


def newest_attempt(run: Run) -> int:
    """Return the number of the newest attempt; 0 if there is none."""
    numbers = (layout.parse_attempt(entry.key) for entry in run.store.list(layout.ATTEMPTS))
    newest = max((number for number in numbers if number), default=0)
    while run.store.exists(layout.attempt(newest + 1)):  # the listing may be behind
        newest += 1
    return newest


def chain(run: Run, attempt: int | None = None) -> list[Span]:
    """Return the chain of attempts that led to `attempt` (by default the newest attempt), oldest first, with the syncs
    for which each of them counts. Attempts that led nowhere are left out. Raise Missing or Damaged if a record cannot
    be read."""
    number = newest_attempt(run) if attempt is None else attempt
    spans: list[Span] = []
    last_sync: int | None = None
    while number:
        origin = read_attempt(run, number).continues
        spans.append(Span(number, origin.number + 1 if origin else 0, last_sync))
        number, last_sync = (origin.attempt, origin.number) if origin else (0, None)
    return spans[::-1]


def chain_as_readable(run: Run, ledger: Collection[Version], damage: DamageLog) -> list[Span]:
    """Return the `readable_chain` of a run, from the records of attempts that are stored."""
    keys = [entry.key for entry in run.store.list(layout.ATTEMPTS) if layout.parse_attempt(entry.key)]
    stored: dict[str, bytes] = {}
    for key, read in records.read_each(run.store, keys):
        with damage.looking_at(key):
            stored[key] = read()
    return readable_chain(stored, ledger, damage)


def readable_chain(stored: Mapping[str, bytes], ledger: Collection[Version], damage: DamageLog) -> list[Span]:
    """Return the chain of attempts that led to the newest attempt, even if records of attempts are damaged or missing.
    `stored` has the bytes of the records by key. `ledger` has the sync and attempt of each object of the ledger. If the
    record of an attempt cannot be used, `damage` says so, and the attempt counts as continuing from the sync before its
    ledger begins."""
    attempts = _readable(stored, damage)
    cited = {layout.parse_attempt(key) or 0 for key in stored} | {name.attempt for name in ledger}
    newest = max(cited, default=0)
    for number in range(1, newest + 1):
        if layout.attempt(number) not in stored:
            damage.add(layout.attempt(number), f"{IS_MISSING}{_GUESSED}")
    spans: list[Span] = []
    number, last_sync = newest, None
    while number:
        if attempt := attempts.get(number):
            origin = attempt.continues
        else:
            begun = min((name.number for name in ledger if name.attempt == number), default=None)
            origin = Version(begun - 1, number - 1) if begun is not None and number > 1 else None
            if begun is None and number > 1:  # the attempt wrote no ledger
                number -= 1
                continue
        spans.append(Span(number, origin.number + 1 if origin else 0, last_sync))
        number, last_sync = (origin.attempt, origin.number) if origin else (0, None)
    return spans[::-1]


def _readable(stored: Mapping[str, bytes], damage: DamageLog) -> dict[int, Attempt]:
    found: dict[int, Attempt] = {}
    wrong = DamageLog()
    for key, data in stored.items():
        if number := layout.parse_attempt(key):
            with wrong.looking_at(key):
                found[number] = decode(data, key, number)
    for it in wrong.found():
        damage.add(it.key, f"{it.problem}{_GUESSED}")
    return found


def newest_checkpoint(run: Run, spans: Sequence[Span]) -> Version | None:
    """Return the newest complete checkpoint that `accepts` accepts; None if there is none. Checkpoints of abandoned
    attempts do not count."""
    found = manifest_folders.complete(run.store, layout.CHECKPOINTS)
    return max((it for it in found if accepts(spans, it)), key=lambda it: it.order, default=None)


def accepts(spans: Sequence[Span], checkpoint: Version) -> bool:
    """True if the attempt that wrote this checkpoint counts at the checkpoint's sync, according to `spans`."""
    return any(span.attempt == checkpoint.attempt and span.covers(checkpoint.number) for span in spans)


def stands(spans: Sequence[Span], version: Version) -> bool:
    """True if a version or checkpoint belongs to the chain of attempts `spans`. Version 0 always does, because all
    attempts that start from the beginning start with the same weights. An attempt publishes the version that it starts
    from again, under its own number; this version belongs to the chain too."""
    return not version.number or any(
        span.attempt == version.attempt and (span.covers(version.number) or span.first_sync == version.number + 1)
        for span in spans
    )


def encode(attempt: Attempt) -> bytes:
    """Return the bytes of an attempt's record. The record names the host and process that claim the attempt. So two
    trainers never write the same bytes, and each knows whether its claim won."""
    origin = attempt.continues
    record = {
        "attempt": attempt.number,
        "continues": {"sync": origin.number, "attempt": origin.attempt} if origin else None,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "previous_sha256": attempt.previous_sha256,
        "created_at": attempt.created_at,
    }
    return records.encode(record)
