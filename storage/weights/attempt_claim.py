"""Claims the next attempt of a run, and chooses the checkpoint that the attempt continues."""

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
"""Gets a checkpoint and the folder with its verified files. Raises Damaged if a trainer cannot continue from the
checkpoint."""

PassOver = Callable[[Version, Damaged], object]
"""Called with each damaged checkpoint, and what is wrong with it, before an older checkpoint is tried. The damaged
checkpoint is not removed."""


def claim_attempt(run: Run, *, check: Check | None = None, pass_over: PassOver | None = None) -> Attempt:
    """Claim the next attempt for this trainer, and return it. The attempt continues the newest intact checkpoint from
    which gradient steps can be taken. All files of this checkpoint are read and compared with its manifest before the
    attempt is stored. Then every earlier attempt is superseded.

    Raise Damaged if there are checkpoints and none is intact, or if a fork lacks the checkpoint that it starts from.
    Raise UnsafeStore if the store would let two trainers claim the same attempt: the run may have been moved to such a
    store after it was created."""
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
            continue  # another trainer was first: the checkpoint must be chosen again, after that attempt
        if continues and manifest_folders.read_manifest(run.store, layout.checkpoint(continues)) is None:
            log.warning("%s: checkpoint %s was pruned while attempt %d claimed it", run.url, continues, attempt.number)
            continue  # the previous trainer pruned it, unaware of this attempt; that trainer has a newer checkpoint
        if before and not continues and not run.parent:
            log.warning("%s: attempt %d starts from the beginning: no checkpoint exists", run.url, attempt.number)
        return attempt


class _Choice:
    """Chooses the checkpoint that the next attempt continues, and remembers which checkpoints cannot be used."""

    def __init__(self, run: Run, check: Check | None, pass_over: PassOver | None):
        self.run, self.check, self.pass_over = run, check, pass_over
        self.damaged: dict[Version, Damaged] = {}
        self.removed: set[Version] = set()

    def newest_intact(self, attempt: int) -> Version | None:
        """Return the checkpoint that the attempt after `attempt` should continue; None if the run must start from the
        beginning. Raise Damaged if no checkpoint can be used."""
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
                return self.newest_intact(attempt)  # the trainer that has just pruned this one has a newer checkpoint
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
            log.warning("%s: checkpoint %s is skipped: %s", self.run.url, checkpoint, error)


def _candidates(run: Run, attempt: int) -> Iterator[Version]:
    """Yield the checkpoints from which a run can continue after an attempt, best first. First come those of the chain
    of attempts that led to `attempt`, newest first; then those of the chain that led to the attempt before; and so on.
    So an attempt whose checkpoints are all gone or damaged is ignored. A fork goes back no further than the checkpoint
    that it starts from."""
    start = run.parent.sync if run.parent else 0
    complete = manifest_folders.complete(run.store, layout.CHECKPOINTS)
    stored = [checkpoint for checkpoint in complete if checkpoint.number >= start]
    offered: set[Version] = set()
    for number in range(attempt, 0, -1):
        spans = chain(run, number)
        new = [checkpoint for checkpoint in stored if checkpoint not in offered and accepts(spans, checkpoint)]
        offered.update(new)
        yield from reversed(new)
        if len(offered) == len(stored):
            return


def _newest_record(run: Run) -> int:
    numbers = (layout.parse_sync(entry.key) for entry in run.store.list(layout.SYNCS))
    return max((number for number in numbers if number is not None), default=0)
