"""Provides a run's records and shards as files on this machine. Objects of a remote run are copied to the cache; each
is copied once, because objects never change."""

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from storage import layout
from storage.local_files.regular_files import read_regular
from storage.local_files.shared_cache import cache_folder
from storage.local_files.temporary_files import A_DAY, remove_left_behind, temporary_beside
from storage.objects.damage import DamageLog
from storage.objects.store import Entry
from storage.runs.run import Run
from tba.errors import Missing, StorageError, TBAError

Progress = Callable[[int, int], None]
"""Called with the number of objects that are done and the number of all objects."""

LISTED = (
    layout.EVALUATIONS,
    layout.CHECKPOINTS,
    layout.VERSIONS,
    layout.LEDGER,
    layout.STEPS,  # if the steps of a sync are stored, so are its draws
    layout.DRAWS,
    layout.SYNCS,
    layout.TRAJECTORIES,
    layout.COMPACTIONS,  # a shard that is removed after its folder was listed lies in a compaction
    layout.PROMPTS,
    layout.ARITHMETIC,
    layout.ATTEMPTS,
    layout.RETENTION,
    layout.EVENTS,
)
"""The folders that are listed, in this order. An object that refers to another is listed before that other object, so
the snapshot of a live run never has a reference to an object that it lacks."""

PAUSES = (0.1, 0.3, 1.0, 2.0)
"""Seconds to wait before each new attempt at a snapshot, if a listed shard or compaction was gone when it was read:
most likely the run was just compacted."""

_OF_A_RUN = re.compile(r"-[0-9a-f]{16}$")  # the end of the name of every folder with copies of a run
_SIDE_BY_SIDE = 16  # objects copied at once
_KEPT = 30 * 24 * 3600.0  # seconds for which the copies of a run stay if nobody reads the run
_ROWS = (layout.TRAJECTORIES, layout.COMPACTIONS)
_KEPT_ROWS = 3600.0  # seconds for which a copy of rows stays after it was made, even if the rows were compacted


@dataclass(frozen=True)
class Snapshot:
    """The objects that a run had stored at one moment, as local files by key. Files of weights are not included."""

    run: Run
    files: Mapping[str, Path]
    copied: bool  # True for copies of a remote store: each file's name ends with the start of its sha256

    def keys(self, prefix: str) -> list[str]:
        return [key for key in self.files if key.startswith(prefix)]

    def read(self, key: str) -> bytes:
        """Return the bytes of an object. If its local copy was changed, replace the copy from the store first. Raise
        FileNotFoundError if the object was removed after the snapshot."""
        data = read_regular(self.files[key])
        if self.copied and self.files[key].suffix != _suffix(data):
            data = self.run.store.read(key)
            _place(data, self.files[key])
        return data

    def read_all(
        self, prefix: str, damage: DamageLog, *, only: Callable[[str], bool] = lambda key: True
    ) -> Iterator[tuple[str, bytes]]:
        """Yield the key and the bytes of each object under a prefix, in the order of the listing. Objects that were
        removed after the listing are left out. Objects that cannot be read are added to `damage` and left out too."""
        for key in filter(only, self.keys(prefix)):
            try:
                data = self.read(key)
            except FileNotFoundError:
                continue
            except OSError as error:
                if isinstance(error, TBAError):
                    raise
                damage.add(key, f"cannot be read: {error.strerror or error}")
                continue
            yield key, data


def take_snapshot(run: Run, *, progress: Progress | None = None) -> Snapshot:
    """Return a snapshot of a run as it is now. Of a remote run, only objects that have no copy yet are copied. If an
    object is removed after it was listed, list the run again a few times; an object that is still gone is left out."""
    progress = progress or (lambda done, total: None)
    snapshot, whole = _take(run, progress)
    for pause in PAUSES:
        if whole:
            break
        time.sleep(pause)
        snapshot, whole = _take(run, progress)
    return snapshot


def _take(run: Run, progress: Progress) -> tuple[Snapshot, bool]:
    """Return a snapshot, and whether it has all shards and compactions that were listed; some may have been removed
    after the listing."""
    entries = [entry for prefix in LISTED for entry in run.store.list(prefix) if _wanted(entry.key)]
    if run.store.local_path(layout.RUN) is not None:
        here = {entry.key: run.store.local_path(entry.key) for entry in entries}
        return Snapshot(run, {key: path for key, path in here.items() if path is not None}, copied=False), True
    copies, whole = _copy(run, entries, progress)
    return Snapshot(run, copies, copied=True), whole


def _wanted(key: str) -> bool:
    """True if a snapshot includes the object. Of the folders of versions and checkpoints, only the manifests are
    included."""
    folder = layout.parse_folder(key)
    return layout.is_part(key) and (folder is None or folder[1] == layout.MANIFEST)


def _copy(run: Run, entries: Sequence[Entry], progress: Progress) -> tuple[dict[str, Path], bool]:
    """Copy the listed objects that have no copy yet. Return the copies by key, and whether all listed shards and
    compactions are among them. The name of the folder with the copies depends on the content of `run.json`, so a new
    run under an old name gets a new folder."""
    identity = sha256(run.url.encode() + b"\0" + run.store.read(layout.RUN)).hexdigest()[:16]
    folder = cache_folder("runs") / f"{run.name}-{identity}"
    _use(folder)
    found = _copies(folder)
    missing = [entry for entry in entries if entry.key not in found or found[entry.key].size != entry.size]
    copies = {key: copy.path for key, copy in found.items()}

    def copy(entry: Entry) -> None:
        try:
            data = run.store.read(entry.key)
        except Missing:  # removed after it was listed
            copies.pop(entry.key, None)
            return
        copies[entry.key] = folder / f"{entry.key}{_suffix(data)}"
        _place(data, copies[entry.key])

    with ThreadPoolExecutor(_SIDE_BY_SIDE) as pool:
        for done, _ in enumerate(pool.map(copy, missing), start=1):
            progress(done, len(missing))
    here = {entry.key: copies[entry.key] for entry in entries if entry.key in copies}
    whole = all(entry.key in here for entry in entries if entry.key.startswith(_ROWS))
    if whole:
        _forget([copy for key, copy in found.items() if key.startswith(_ROWS) and key not in here])
    return here, whole


def _use(folder: Path) -> None:
    """Make a folder for copies, and update its time of use. Remove the copies of runs that nobody has read for 30
    days."""
    folder.mkdir(exist_ok=True)
    os.utime(folder)
    for other in filter(lambda it: _OF_A_RUN.search(it.name), folder.parent.iterdir()):
        with suppress(FileNotFoundError):  # another process has just removed it
            if time.time() - other.stat().st_mtime > _KEPT:
                shutil.rmtree(other, ignore_errors=True)


class _Found(NamedTuple):
    path: Path
    size: int
    made: float


def _copies(folder: Path, prefix: str = "") -> dict[str, _Found]:
    """Return the copies in a folder by key, and remove unfinished files that killed processes left. Names and sizes
    come from listings alone, because there may be a hundred thousand copies."""
    found: dict[str, _Found] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                remove_left_behind(folder / entry.name, A_DAY)
                continue
            if entry.is_dir(follow_symlinks=False):
                found.update(_copies(folder / entry.name, f"{prefix}{entry.name}/"))
            else:
                key = f"{prefix}{entry.name}".rpartition(".")[0]
                with suppress(FileNotFoundError):  # another process has just removed it
                    about = entry.stat()
                    found[key] = _Found(folder / entry.name, about.st_size, about.st_mtime)
    return found


def _forget(compacted: Sequence[_Found]) -> None:
    """Remove copies of rows that have been compacted into other objects. Copies that were made in the last hour stay,
    because another process may be about to open them."""
    for copy in compacted:
        if time.time() - copy.made > _KEPT_ROWS:
            with suppress(OSError):  # a copy that stays does no harm
                copy.path.unlink()


def _suffix(data: bytes) -> str:
    return f".{sha256(data).hexdigest()[:16]}"


def _place(data: bytes, path: Path) -> None:
    temporary = temporary_beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError as error:
        raise StorageError(f"the copy {path} cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
