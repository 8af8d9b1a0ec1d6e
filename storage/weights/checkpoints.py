"""Checkpoints: everything that a trainer needs to continue from a sync. Each checkpoint is one manifest folder."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from storage import layout
from storage.objects import manifest_folders, records
from storage.runs import attempts, retention
from storage.runs.forks import pinned_checkpoints
from storage.runs.run import Run
from tba.errors import Damaged, Missing, StorageError
from tba.types import Version

log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of a run. Like a version, a checkpoint is named by its sync and attempt."""

    def __init__(self, run: Run):
        self.run = run
        self._intact: set[Version] = set()  # checkpoints that this object has found intact

    def save(
        self,
        sync: int,
        attempt: int,
        step: int,
        folder: Path,
        *,
        sha256s: Mapping[str, str] | None = None,
        stored: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Store the files of a folder as a checkpoint. No file may change afterwards. `sha256s` has the digests of
        files that were hashed while they were written. `stored` has what `save_part` has returned for each file that
        was stored before. Raise StorageError if the ledger of the sync is not stored yet: resuming from the checkpoint
        would then lose steps."""
        if sync:
            for key in (layout.draws(sync, attempt), layout.steps(sync, attempt)):
                if not self.run.store.exists(key):
                    raise StorageError(
                        f"{self.run.url}: checkpoint {sync} of attempt {attempt} cannot be saved before {key} is stored"
                    )
        extra = {"sync": sync, "attempt": attempt, "step": step}
        prefix = layout.checkpoint(Version(sync, attempt))
        manifest_folders.publish(self.run.store, prefix, folder, extra, sha256s=sha256s, stored=stored, may_link=True)
        self._intact.add(Version(sync, attempt))  # its files have just been hashed

    def save_part(self, sync: int, attempt: int, file: Path, *, sha256: str) -> dict[str, Any]:
        """Store one file of a checkpoint that does not exist yet. Return its entry in the manifest, for `save`. The
        file may not change afterwards."""
        self.run.store.upload(file, layout.checkpoint(Version(sync, attempt)) + file.name, may_link=True)
        return {"name": file.name, "bytes": file.stat().st_size, "sha256": sha256}

    def complete(self) -> list[Version]:
        """Return all complete checkpoints, oldest first, including those of abandoned attempts."""
        return manifest_folders.complete(self.run.store, layout.CHECKPOINTS)

    def newest(self, attempt: int | None = None) -> Version | None:
        """Return the newest checkpoint on the chain of attempts that led to `attempt` (by default the newest
        attempt)."""
        return attempts.newest_checkpoint(self.run, attempts.chain(self.run, attempt))

    def load(self, sync: int, attempt: int, *, trusts_marks: bool = False) -> Path:
        """Return a local folder with the files of a checkpoint. Each file has been compared with the sha256 in the
        manifest. With `trusts_marks`, a comparison by another process of this machine counts. Raise Missing if there is
        no such checkpoint, or if it is removed during the call. Raise Damaged, naming the file, if a file is not what
        was saved."""
        checkpoint, store = Version(sync, attempt), self.run.store
        self.check_manifest(checkpoint)
        return manifest_folders.local_copy(store, layout.checkpoint(checkpoint), keep=2, trusts_marks=trusts_marks)

    def check(self, checkpoint: Version) -> None:
        """Raise Missing or Damaged as `load` does, but download nothing. Files on a local disk are read whole. For
        files in an object store, only the names and sizes are checked."""
        prefix = layout.checkpoint(checkpoint)
        if self.run.store.local_path(prefix.rstrip("/")):
            self.load(*checkpoint)
        else:
            self.check_manifest(checkpoint)
            manifest_folders.check_sizes(self.run.store, prefix)

    def check_manifest(self, checkpoint: Version) -> None:
        """Raise Damaged unless the manifest names this checkpoint and the gradient step that its sync follows. Raise
        Missing if there is no manifest."""
        name = f"{self.run.url}/{layout.checkpoint(checkpoint)}{layout.MANIFEST}"
        manifest = manifest_folders.read_manifest(self.run.store, layout.checkpoint(checkpoint))
        if manifest is None:
            raise Missing(f"{name} does not exist: a checkpoint without a manifest does not count as stored")
        with records.reading(name):
            sync, attempt, step = records.integers(manifest, "sync", "attempt", "step")
        if (sync, attempt) != checkpoint:
            raise Damaged(f"{name} says that this is checkpoint {Version(sync, attempt)}, not {checkpoint}")
        if (recorded := recorded_step(self.run, sync)) not in (step, None):
            raise Damaged(
                f"{name} says step {step}, but {layout.sync(sync)} says that sync {sync} follows step {recorded}"
            )

    def prune(self, keep: int) -> list[Version]:
        """Remove all checkpoints except the newest `keep` intact ones on the chain of attempts, and those that this run
        or a fork of it starts from. Damaged checkpoints that are newer than the oldest of these also stay, and do not
        count towards `keep`. Nothing is removed if no checkpoint is intact. Return the removed checkpoints."""
        spans = attempts.chain(self.run)
        found = manifest_folders.survey(self.run.own, layout.CHECKPOINTS)
        on_chain = [checkpoint for checkpoint in found.complete if attempts.accepts(spans, checkpoint)]
        newest = self._newest_intact(on_chain, keep)
        if not newest:  # for example, a chain that starts from the beginning has no checkpoint yet
            return []
        why = f"checkpoints beyond the newest {keep}"
        start = [Version(self.run.parent.sync, self.run.parent.attempt)] if self.run.parent else []
        return retention.keep_only(
            self.run, layout.CHECKPOINTS, found, lambda: {*start, *newest, *pinned_checkpoints(self.run)}, why=why
        )

    def _newest_intact(self, oldest_first: Sequence[Version], keep: int) -> list[Version]:
        """Return the newest `keep` intact checkpoints, and the damaged ones that are newer than the oldest of them.
        Return an empty list if none is intact."""
        newest: list[Version] = []
        intact = 0
        for checkpoint in reversed(oldest_first):
            if intact == keep:
                break
            newest.append(checkpoint)
            intact += self._is_intact(checkpoint)
        return newest if intact else []

    def _is_intact(self, checkpoint: Version) -> bool:
        """True if a checkpoint is what was saved. A checkpoint that this object has found intact before is not read
        again, because reading large files takes long."""
        if checkpoint not in self._intact:
            try:
                self.check(checkpoint)
            except (Missing, Damaged) as error:
                log.warning("%s: checkpoint %s does not count as one to keep: %s", self.run.url, checkpoint, error)
                return False
            self._intact.add(checkpoint)
        return True


def recorded_step(run: Run, sync: int) -> int | None:
    """Return the gradient step that a sync follows; None if its sync record is missing or damaged. The code that
    applies the record raises the error."""
    key = layout.sync(sync)
    with suppress(Missing, Damaged), records.reading(f"{run.url}/{key}"):
        [step] = records.integers(records.read(run.store, key, "step"), "step")
        return step
    return None
