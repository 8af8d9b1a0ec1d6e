"""Attempts: the lives of a run's trainer. The number of the newest one is the fencing epoch; each says which
checkpoint it continues, so which attempt's ledger counts for which syncs follows from the records alone."""

import logging
import os
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from storage import layout
from storage.objects import manifest_folders, records
from storage.objects.damage import IS_MISSING, DamageLog
from storage.objects.store import probe
from storage.runs.retention import in_the_way
from storage.runs.run import Run
from storage.weights import checkpoint_files, lost_checkpoints
from tba.errors import AlreadyExists, Damaged, Missing
from tba.types import Version

log = logging.getLogger(__name__)

_GUESSED = "; what the attempt continues is taken from where its ledger begins"


@dataclass(frozen=True, kw_only=True)
class Attempt:
    number: int
    continues: Version | None  # the checkpoint, by its sync and attempt; None starts from the beginning
    created_at: str
    previous_sha256: str | None = None  # of the record of the attempt before; None for the first, and in older runs


class Span(NamedTuple):
    """The syncs, first and last included, for which the ledger of an attempt counts; `last_sync` None: all later."""

    attempt: int
    first_sync: int
    last_sync: int | None

    def covers(self, sync: int) -> bool:
        return self.first_sync <= sync and (self.last_sync is None or sync <= self.last_sync)


Check = Callable[[Version, Path], object]
"""Raises Damaged if a trainer could not go on from a checkpoint whose verified files lie in this folder."""

PassOver = Callable[[Version, Damaged], object]
"""Hears of a damaged checkpoint, which stays where it is, before an older one is tried."""


def claim_attempt(run: Run, *, check: Check | None = None, pass_over: PassOver | None = None) -> Attempt:
    """Become the newest attempt, continuing the newest intact checkpoint there is a way to. All its files have been
    read and compared with the manifest before the attempt names it. From then on every earlier attempt is superseded.

    Damaged if there are checkpoints and none is intact, or a fork lacks the one it starts from. UnsafeStore if the
    store would let two trainers become the same attempt: the run may have been moved since it was created."""
    probe(run.store, racers=1)
    choice = _Choice(run, check, pass_over)
    while True:
        before = newest_attempt(run)
        continues = choice.newest_intact(before)
        attempt = Attempt(
            number=before + 1,
            continues=continues,
            created_at=records.now(),
            previous_sha256=records.sha256_of(run.store, layout.attempt(before)) if before else None,
        )
        try:
            run.store.create(layout.attempt(attempt.number), _encode(attempt))
        except AlreadyExists:
            continue  # another trainer was first: look again, it is part of the chain now
        if continues and manifest_folders.read_manifest(run.store, layout.checkpoint(continues)) is None:
            log.warning("%s: checkpoint %s was pruned while attempt %d claimed it", run.url, continues, attempt.number)
            continue  # by the trainer before this one, which did not know yet and has a newer one
        if before and not continues and not run.parent:
            log.warning("%s: attempt %d starts from the beginning: no checkpoint exists", run.url, attempt.number)
        return attempt


class _Choice:
    """Chooses the checkpoint that the next attempt continues, and remembers which ones cannot serve."""

    def __init__(self, run: Run, check: Check | None, pass_over: PassOver | None):
        self.run, self.check, self.pass_over = run, check, pass_over
        self.damaged: dict[Version, Damaged] = {}
        self.removed: set[Version] = set()

    def newest_intact(self, attempt: int) -> Version | None:
        """Return the best checkpoint after this attempt; None if the run has to start from the beginning."""
        for checkpoint in _candidates(self.run, attempt):
            if checkpoint in self.removed or checkpoint in self.damaged:
                continue
            if self.damaged and (given_up := in_the_way(self.run, checkpoint.number, _newest_record(self.run))):
                raise lost_checkpoints.none_intact(self.run, self.damaged, given_up)
            try:
                folder = checkpoint_files.load(self.run, checkpoint)
                if self.check:
                    self.check(checkpoint, folder)
            except Missing as error:
                log.warning("%s", error)
                self.removed.add(checkpoint)
                return self.newest_intact(attempt)  # who has pruned it meanwhile has a newer one
            except Damaged as error:
                self._pass_over(checkpoint, error)
            else:
                return checkpoint
        if self.damaged:
            raise lost_checkpoints.none_intact(self.run, self.damaged)
        if self.run.parent and self.run.parent.sync:
            raise lost_checkpoints.no_start(self.run)
        return None

    def _pass_over(self, checkpoint: Version, error: Damaged) -> None:
        self.damaged[checkpoint] = error
        if self.pass_over:
            self.pass_over(checkpoint, error)
        else:
            log.warning("%s: checkpoint %s is passed over: %s", self.run.url, checkpoint, error)


def _candidates(run: Run, attempt: int) -> Iterator[Version]:
    """The checkpoints that can be gone on from after an attempt, best first: the newest ones of the chain that led to
    the attempt, then those of the chain without it. So an attempt whose checkpoints are all gone or damaged is as if
    it had never been. A fork goes back to the checkpoint it starts from, and no further."""
    start = run.parent.sync if run.parent else 0
    stored = [it for it in manifest_folders.complete(run.store, layout.CHECKPOINTS) if it.number >= start]
    offered: set[Version] = set()
    for number in range(attempt, 0, -1):
        spans = chain(run, number)
        found = [it for it in stored if it not in offered and accepts(spans, it)]
        offered.update(found)
        yield from reversed(found)
        if len(offered) == len(stored):
            return


def _newest_record(run: Run) -> int:
    numbers = (layout.parse_sync(entry.key) for entry in run.store.list(layout.SYNCS))
    return max((number for number in numbers if number is not None), default=0)


def read_attempt(run: Run, number: int) -> Attempt:
    key = layout.attempt(number)
    return decode(run.store.read(key), f"{run.url}/{key}", number)


def decode(data: bytes, name: str, number: int) -> Attempt:
    """Decode the record of this attempt. Damaged, naming the object, if the bytes are no such record."""
    record = records.decode(data, name, "continues", "created_at")
    with records.reading(name):
        origin = record["continues"]
        continues = Version(int(origin["sync"]), int(origin["attempt"])) if origin else None
    if record.get("attempt", number) != number:
        raise Damaged(f"{name} says it is attempt {record['attempt']!r:.20}")
    if continues and continues.attempt >= number:
        raise Damaged(f"{name} continues a later attempt, {continues.attempt}")
    return Attempt(
        number=number,
        continues=continues,
        created_at=record["created_at"],
        previous_sha256=record.get("previous_sha256"),
    )


def newest_attempt(run: Run) -> int:
    """0 if there is none."""
    numbers = (layout.parse_attempt(entry.key) for entry in run.store.list(layout.ATTEMPTS))
    newest = max((number for number in numbers if number), default=0)
    while run.store.exists(layout.attempt(newest + 1)):  # the listing may be behind
        newest += 1
    return newest


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


def chain_as_readable(run: Run, ledger: Collection[Version], damage: DamageLog) -> list[Span]:
    """Return the `readable_chain` of the attempts whose records a run has stored."""
    keys = [entry.key for entry in run.store.list(layout.ATTEMPTS) if layout.parse_attempt(entry.key)]
    stored: dict[str, bytes] = {}
    for key, read in records.read_each(run.store, keys):
        with damage.looking_at(key):
            stored[key] = read()
    return readable_chain(stored, ledger, damage)


def readable_chain(stored: Mapping[str, bytes], ledger: Collection[Version], damage: DamageLog) -> list[Span]:
    """Return the chain of the newest attempt, as far as the records of attempts can be read. `stored` has their bytes
    by key, `ledger` the sync and attempt of each object of the ledger. An attempt whose record is damaged or missing is
    noted, and taken to continue from where its ledger begins."""
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
            if begun is None and number > 1:  # it has nothing of its own
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
    """The newest complete checkpoint that the chain accepts; those of abandoned attempts do not count."""
    found = manifest_folders.complete(run.store, layout.CHECKPOINTS)
    return max((it for it in found if accepts(spans, it)), key=lambda it: it.order, default=None)


def accepts(spans: Sequence[Span], checkpoint: Version) -> bool:
    """Whether a checkpoint lies on the chain."""
    return any(span.attempt == checkpoint.attempt and span.covers(checkpoint.number) for span in spans)


def stands(spans: Sequence[Span], version: Version) -> bool:
    """Whether a version or checkpoint belongs to the run as it stands. Whoever begins begins with the same weights, and
    an attempt also publishes the version it starts from."""
    return not version.number or any(
        span.attempt == version.attempt and (span.covers(version.number) or span.first_sync == version.number + 1)
        for span in spans
    )


def _encode(attempt: Attempt) -> bytes:
    """With who claimed it, so that two trainers never write the same bytes and each knows whether it won."""
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
