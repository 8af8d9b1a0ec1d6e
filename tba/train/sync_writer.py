"""Write what a sync stores (ledger, version, checkpoint) from a copy of the trainer, while the trainer goes on.

Three threads write, one for each kind, so that a slow upload delays neither the ledger nor the steps:

    ledger       ledger of sync n, with the digest of the weights
    versions     version n -> pruning      once ledger n is stored
    checkpoints  checkpoint n -> pruning   once ledger n is stored

If the store is slow, some syncs publish no version. With `sync.lag` or `sampling.max_age`, every sync publishes one,
because searchers or a sync record may wait for it. With `sync.lag=0`, sync record n waits for responses that version n
generates: version n then comes before ledger n, but after ledger n - 1.

A job that fails stops all jobs that follow it. Each thread holds at most two copies of the weights: one that it writes,
and one that waits. The trainer waits only if the store is so slow that there is no room for the next copy.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from types import TracebackType
from typing import Any, Self

from tba.config import Config
from tba.errors import Stopped, StorageError, Superseded, TBAError
from tba.interfaces import CheckpointStore, Lease, Ledger, VersionStore
from tba.models.policy import AdapterSnapshot, Snapshot
from tba.runtime.background import Background
from tba.runtime.waiting import timed
from tba.train.learner import Learner
from tba.train.stop_time import StoreTimes, checkpoint_to_version, measured
from tba.train.training_state import TrainingState
from tba.types import Base, StepRecord, Version


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A copy of the trainer, in main memory, as it is after the step that a sync follows."""

    sync: int
    step: int
    snapshot: Snapshot | AdapterSnapshot
    state: TrainingState | None  # without the prompt queues; None if no checkpoint is due
    publish: bool


class SyncWriter:
    def __init__(
        self,
        config: Config,
        *,
        attempt: int,
        ledger: Ledger,
        versions: VersionStore,
        checkpoints: CheckpointStore,
        lease: Lease,
        scratch: Path,
        version_scratch: Path | None = None,  # for the files of versions, if not `scratch`
    ):
        self.config, self.attempt, self.lease, self.scratch = config, attempt, lease, scratch
        self.version_scratch = version_scratch or scratch
        self.lag, self.publishes_all = config.sync.lag, config.awaits_searchers
        self.previous: Future[None] | None = None  # writes the ledger of the previous sync
        self.ledger, self.versions, self.checkpoints = ledger, versions, checkpoints
        self.writing, self.publishing, self.keeping = map(Background, ("ledger", "versions", "checkpoints"))
        self.times = StoreTimes(checkpoint_to_version(config))
        self.published = -1  # the number of the version that was published last
        self.before: Path | None = None  # folder with the files of that version
        self.base: Base | None = None  # the last version that is stored whole, with its files

    # --- in the trainer's thread ----------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Write the syncs that were closed, even if a later step failed, because closed syncs are valid. But if this
        attempt is superseded, drop all jobs that have not begun: the successor relies on what is stored already."""
        if kind is not None and issubclass(kind, Superseded):
            for line in self._lines():
                line.cancel()
        for line in self._lines():
            line.close()

    def check(self) -> None:
        """Raise the error of a job that has failed."""
        for line in self._lines():
            line.check()

    def copy(
        self,
        learner: Learner,
        *,
        sync: int,
        step: int,
        last: bool,
        seconds: dict[str, float],
    ) -> Copy:
        """Wait until there is room for another copy of the trainer, and make the copy. Its version is published if the
        sync has a checkpoint, as the last sync always has, or if every version must be published. Otherwise it is
        published only if no other version is being published."""
        checkpoint = last or sync % self.config.sync.checkpoint_every == 0
        with timed(seconds, "backlog"):
            self.writing.make_room()
            if checkpoint or self.publishes_all:
                self.publishing.make_room()
            if checkpoint:
                self.keeping.make_room()
        with timed(seconds, "snapshot"):
            return Copy(
                sync=sync,
                step=step,
                snapshot=learner.snapshot(),
                state=learner.state(step=step, sync=sync) if checkpoint else None,
                publish=checkpoint or self.publishes_all or self.publishing.idle(),
            )

    def write(self, copy: Copy, records: Sequence[StepRecord], admitted: Future[dict[str, Any]]) -> None:
        """Store the steps that a sync closes, its version and its checkpoint. `admitted` is a future whose result is
        the state of the prompt queues, once sync record `copy.sync` is stored."""
        stored = self.writing.submit(partial(self._write_ledger, copy, records, admitted))
        if copy.state is not None:  # before the version: pruning asks whether a checkpoint is being made
            self.keeping.submit(partial(self._after, stored, partial(self._keep, copy, copy.state, admitted)))
        if copy.publish:
            before = self.previous if self.lag == 0 else stored  # with a lag of 0, sync record n waits for version n
            self.publishing.submit(partial(self._after, before, partial(self._publish, copy)))
        self.previous = stored

    def keep(self, learner: Learner, *, sync: int, step: int, admitted: Future[dict[str, Any]]) -> None:
        """Store a checkpoint of the sync that was written last, unless it has one. `admitted` is the future that was
        passed to `write` for this sync."""
        if sync % self.config.sync.checkpoint_every == 0:
            return
        self.keeping.make_room()
        state = learner.state(step=step, sync=sync)
        copy = Copy(sync=sync, step=step, snapshot=learner.snapshot(), state=state, publish=False)
        self.keeping.submit(partial(self._after, self.previous, partial(self._keep, copy, state, admitted)))

    def finish(self) -> None:
        """Wait until everything is stored, and prune the versions once more."""
        for line in self._lines():
            line.finish()
        self._prune_versions()

    def publish(self, snapshot: Snapshot | AdapterSnapshot, sync: int) -> None:
        with measured(self.times.version):
            self._publish_version(snapshot, sync)

    def _publish_version(self, snapshot: Snapshot | AdapterSnapshot, sync: int) -> None:
        before, base = self.before, self.base
        with _naming_scratch(self.version_scratch):
            folder = Path(mkdtemp(dir=self.version_scratch))
            written = snapshot.save(folder, dtype=self.config.model.publish_dtype, before=before)
        version, every = Version(sync, self.attempt), self.config.sync.whole_every
        whole = self.versions.publish(
            version,
            step=self.config.step_of_sync(sync),
            folder=folder,
            weights_sha256=snapshot.digest(self.config.sync.weights_digest),
            changed_share=written.changed_share,
            base=base if base and sync // every == base.version.number // every else None,
            sha256s=written.sha256s,
        )
        self.published, self.before = sync, folder
        if whole:
            self.base = Base(version, folder)
        for path in {before, base.folder} if before and base else ():
            if path not in (self.before, self.base and self.base.folder):
                shutil.rmtree(path)

    # --- in the three threads -------------------------------------------------------------------------------------

    def _write_ledger(self, copy: Copy, records: Sequence[StepRecord], admitted: Future[dict[str, Any]]) -> None:
        admitted.result()  # sync record n comes before ledger n
        digest = copy.snapshot.digest(self.config.sync.weights_digest)
        self._check_owner()
        with measured(self.times.ledger):
            self.ledger.write(copy.sync, records, weights_sha256=digest)

    def _after(self, stored: Future[None] | None, job: Callable[[], None]) -> None:
        """Do a job for version n or checkpoint n once the ledger that the future `stored` writes is stored. This is
        ledger n, or ledger n - 1 if sync record n waits for version n."""
        if stored:
            stored.result()
        self._check_owner()
        job()

    def _publish(self, copy: Copy) -> None:
        self.publish(copy.snapshot, copy.sync)
        if self.keeping.idle():  # a checkpoint that is being made needs its version, and pruning cannot see it yet
            self._prune_versions()

    def _keep(self, copy: Copy, state: TrainingState, admitted: Future[dict[str, Any]]) -> None:
        queues = admitted.result()
        with measured(self.times.checkpoint), TemporaryDirectory(dir=self.scratch) as name:
            with _naming_scratch(self.scratch):
                sha256s = copy.snapshot.save(Path(name)).sha256s
                sha256s |= replace(state, queues=queues).save(Path(name))
            others = state.others()
            self.checkpoints.save(
                copy.sync, self.attempt, step=copy.step, folder=Path(name), sha256s=sha256s, stored=others
            )
        self._check_owner()
        self.checkpoints.prune(self.config.sync.keep_checkpoints)

    def _prune_versions(self) -> None:
        self._check_owner()
        self.versions.prune(keep=self.config.sync.keep_versions, every=self.config.evaluation.every)

    def _check_owner(self) -> None:
        """Raise Superseded if another attempt has taken over. The other attempt relies on what is stored now, so
        nothing may be written or removed any more."""
        with suppress(Stopped):
            self.lease.check()

    def _lines(self) -> tuple[Background, Background, Background]:
        return self.writing, self.publishing, self.keeping


@contextmanager
def _naming_scratch(folder: Path) -> Iterator[None]:
    """Convert an error of the disk of the scratch folder, such as a full disk, into a StorageError that names it."""
    try:
        yield
    except TBAError:
        raise
    except OSError as error:
        raise StorageError(f"{folder}: {error.strerror or error}") from error
