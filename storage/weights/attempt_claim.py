"""Claims the next attempt of a run, and chooses the checkpoint that it continues."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from storage import layout
from storage.objects import manifest_folders, records
from storage.objects.open_store import probe
from storage.runs.attempts import Attempt, accepts, chain, encode, newest_attempt
from storage.runs.retention import in_the_way
from storage.runs.run import Run
from storage.weights import lost_checkpoints
from storage.weights.checkpoints import Checkpoints
from tba.errors import AlreadyExists, Damaged, Missing
from tba.types import Version

log = logging.getLogger(__name__)

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
            run.store.create(layout.attempt(attempt.number), encode(attempt))
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
                folder = Checkpoints(self.run).load(*checkpoint)
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
