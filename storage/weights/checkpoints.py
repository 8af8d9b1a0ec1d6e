"""Checkpoints: all that a trainer needs to go on from a sync, one manifest folder each."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from storage import layout
from storage.objects import manifest_folders, records
from storage.runs import attempts, retention
from storage.runs.forks import pinned_checkpoints
from storage.runs.run import Run
from tba.errors import Damaged, Missing, StorageError
from tba.types import Version

log = logging.getLogger(__name__)


class Checkpoints:
    """Named by sync and attempt, like versions."""

    def __init__(self, run: Run):
        self.run = run
        self._intact: set[Version] = set()  # as far as this object has looked

    def save(self, sync: int, attempt: int, step: int, folder: Path) -> None:
        """Store the files of a folder. The ledger up to the sync comes first: a checkpoint without it is refused,
        since resuming from it would lose the steps in between."""
        if sync:
            for key in (layout.draws(sync, attempt), layout.steps(sync, attempt)):
                if not self.run.store.exists(key):
                    raise StorageError(f"{self.run.url}: checkpoint {sync} of attempt {attempt} needs {key} first")
        extra = {"sync": sync, "attempt": attempt, "step": step}
        manifest_folders.publish(self.run.store, layout.checkpoint(Version(sync, attempt)), folder, extra)
        self._intact.add(Version(sync, attempt))  # its files have just been read whole

    def complete(self) -> list[Version]:
        """Those that exist, oldest first, also of abandoned attempts."""
        return manifest_folders.complete(self.run.store, layout.CHECKPOINTS)

    def newest(self, attempt: int | None = None) -> Version | None:
        """The newest one on the chain that led to `attempt` (the newest attempt if not given)."""
        return attempts.newest_checkpoint(self.run, attempts.chain(self.run, attempt))

    def load(self, sync: int, attempt: int) -> Path:
        """Return a local folder with the files, each compared with the sha256 in the manifest. Missing if there is no
        such checkpoint, also when it is removed meanwhile; Damaged, naming the file, if one is not what was saved."""
        checkpoint = Version(sync, attempt)
        self.check_manifest(checkpoint)
        return manifest_folders.local_copy(self.run.store, layout.checkpoint(checkpoint), keep=2)

    def check(self, checkpoint: Version) -> None:
        """Raise as `load` does, without a download: files on a disk here are read whole, files of an object store are
        only looked for, by name and size."""
        prefix = layout.checkpoint(checkpoint)
        if self.run.store.local_path(prefix.rstrip("/")):
            self.load(*checkpoint)
        else:
            self.check_manifest(checkpoint)
            manifest_folders.check_sizes(self.run.store, prefix)

    def check_manifest(self, checkpoint: Version) -> None:
        """Damaged unless the manifest is of the checkpoint of this name, and of the step that its sync follows."""
        name = f"{self.run.url}/{layout.checkpoint(checkpoint)}{layout.MANIFEST}"
        manifest = manifest_folders.read_manifest(self.run.store, layout.checkpoint(checkpoint))
        if manifest is None:
            raise Missing(f"{name} does not exist, and so the checkpoint does not")
        with records.reading(name):
            sync, attempt, step = records.integers(manifest, "sync", "attempt", "step")
        if (sync, attempt) != checkpoint:
            raise Damaged(f"{name} says that this is checkpoint {Version(sync, attempt)}")
        if (recorded := recorded_step(self.run, sync)) not in (step, None):
            raise Damaged(
                f"{name} says step {step}, but {layout.sync(sync)} says that sync {sync} follows step {recorded}"
            )

    def prune(self, keep: int) -> list[Version]:
        """Give up all but the newest `keep` intact ones of the chain, and those that this run or a fork starts from.
        Damaged ones that are newer than these stay too: they do not count, and are never the only ones left. Returns
        what was removed."""
        spans = attempts.chain(self.run)
        found = manifest_folders.survey(self.run.own, layout.CHECKPOINTS)
        newest = self._newest_intact([it for it in found.complete if attempts.accepts(spans, it)], keep)
        if not newest:  # a chain that starts anew has none to go back to yet
            return []
        why = f"checkpoints beyond the newest {keep}"
        start = [Version(self.run.parent.sync, self.run.parent.attempt)] if self.run.parent else []
        return retention.keep_only(
            self.run, layout.CHECKPOINTS, found, lambda: {*start, *newest, *pinned_checkpoints(self.run)}, why=why
        )

    def _newest_intact(self, oldest_first: Sequence[Version], keep: int) -> list[Version]:
        """The newest `keep` that are intact, with the damaged ones among them; empty if none is intact."""
        newest: list[Version] = []
        intact = 0
        for checkpoint in reversed(oldest_first):
            if intact == keep:
                break
            newest.append(checkpoint)
            intact += self._is_intact(checkpoint)
        return newest if intact else []

    def _is_intact(self, checkpoint: Version) -> bool:
        """True if a checkpoint is what was saved. Each is read at most once, since reading large files takes long."""
        if checkpoint not in self._intact:
            try:
                self.check(checkpoint)
            except (Missing, Damaged) as error:
                log.warning("%s: checkpoint %s does not count among those to keep: %s", self.run.url, checkpoint, error)
                return False
            self._intact.add(checkpoint)
        return True


def recorded_step(run: Run, sync: int) -> int | None:
    """Return the step that a sync follows. None if its record does not tell: whoever applies the record says why."""
    key = layout.sync(sync)
    with suppress(Missing, Damaged), records.reading(f"{run.url}/{key}"):
        [step] = records.integers(records.read(run.store, key, "step"), "step")
        return step
    return None
