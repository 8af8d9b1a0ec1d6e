"""Loads the files of a checkpoint, and checks that they are the files that were saved."""

from contextlib import suppress
from pathlib import Path

from storage import layout
from storage.objects import manifest_folders, records
from storage.runs.run import Run
from tba.errors import Damaged, Missing
from tba.types import Version


def load(run: Run, checkpoint: Version) -> Path:
    """Return a local folder with the files of a checkpoint. Each file has been compared with the sha256 in the
    manifest. Raise Missing if there is no such checkpoint, or if it is removed meanwhile. Raise Damaged, naming the
    file, if a file is not what was saved."""
    check_manifest(run, checkpoint)
    return manifest_folders.local_copy(run.store, layout.checkpoint(checkpoint), keep=2)


def check(run: Run, checkpoint: Version) -> None:
    """Raise as `load` does, but download nothing. Files on a local disk are read whole. For files in an object store,
    only the names and sizes are checked."""
    prefix = layout.checkpoint(checkpoint)
    if run.store.local_path(prefix.rstrip("/")):
        load(run, checkpoint)
    else:
        check_manifest(run, checkpoint)
        manifest_folders.check_sizes(run.store, prefix)


def recorded_step(run: Run, sync: int) -> int | None:
    """Return the step that a sync follows; None if its record is missing or damaged. An error that says so is raised
    where the record is applied."""
    key = layout.sync(sync)
    with suppress(Missing, Damaged), records.reading(f"{run.url}/{key}"):
        [step] = records.integers(records.read(run.store, key, "step"), "step")
        return step
    return None


def check_manifest(run: Run, checkpoint: Version) -> None:
    """Raise Damaged unless the manifest names this checkpoint and the step that its sync follows. Raise Missing if
    there is no manifest."""
    name = f"{run.url}/{layout.checkpoint(checkpoint)}{layout.MANIFEST}"
    manifest = manifest_folders.read_manifest(run.store, layout.checkpoint(checkpoint))
    if manifest is None:
        raise Missing(f"{name} does not exist: a checkpoint without a manifest does not count as stored")
    with records.reading(name):
        sync, attempt, step = records.integers(manifest, "sync", "attempt", "step")
    if (sync, attempt) != checkpoint:
        raise Damaged(f"{name} says that this is checkpoint {Version(sync, attempt)}, not {checkpoint}")
    if (recorded := recorded_step(run, sync)) not in (step, None):
        raise Damaged(f"{name} says step {step}, but {layout.sync(sync)} says that sync {sync} follows step {recorded}")
