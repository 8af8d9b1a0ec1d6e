"""Checkpoints: all that a trainer needs to go on from a sync, one manifest folder each."""

from pathlib import Path

from storage import attempts, folders, layout, retention
from storage.forks import pinned_checkpoints
from storage.run import Run
from tba.errors import StorageError
from tba.types import Version


class Checkpoints:
    """Named by sync and attempt, like versions."""

    def __init__(self, run: Run):
        self.run = run

    def save(self, sync: int, attempt: int, step: int, folder: Path) -> None:
        """Store the files of a folder. The ledger up to the sync comes first: a checkpoint without it is refused,
        since resuming from it would lose the steps in between."""
        if sync:
            for key in (layout.draws(sync, attempt), layout.steps(sync, attempt)):
                if not self.run.store.exists(key):
                    raise StorageError(f"{self.run.url}: checkpoint {sync} of attempt {attempt} needs {key} first")
        extra = {"sync": sync, "attempt": attempt, "step": step}
        folders.publish(self.run.store, layout.checkpoint(Version(sync, attempt)), folder, extra)

    def complete(self) -> list[Version]:
        """Those that exist, oldest first, also of abandoned attempts."""
        return folders.complete(self.run.store, layout.CHECKPOINTS)

    def newest(self, attempt: int | None = None) -> Version | None:
        """The newest one on the chain that led to `attempt` (the newest attempt if not given)."""
        return attempts.newest_checkpoint(self.run, attempts.chain(self.run, attempt))

    def load(self, sync: int, attempt: int) -> Path:
        """A local folder with its verified files."""
        return folders.local_copy(self.run.store, layout.checkpoint(Version(sync, attempt)), keep=2)

    def prune(self, keep: int) -> list[Version]:
        """Give up all but the newest `keep` of the chain, and those that this run or a fork starts from. Returns what
        was removed."""
        spans = attempts.chain(self.run)
        found = folders.survey(self.run.own, layout.CHECKPOINTS)
        newest = [it for it in found.complete if attempts.accepts(spans, it)][-keep:]
        if not newest:  # a chain that starts anew has none to go back to yet
            return []
        why = f"checkpoints beyond the newest {keep}"
        start = [Version(self.run.parent.sync, self.run.parent.attempt)] if self.run.parent else []
        return retention.keep_only(
            self.run, layout.CHECKPOINTS, found, lambda: {*start, *newest, *pinned_checkpoints(self.run)}, why=why
        )
