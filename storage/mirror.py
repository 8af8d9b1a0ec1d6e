"""A run's records and shards as files on this machine. Those of a remote run are copied once: they never change."""

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from storage import layout, records
from storage.cache import cache_folder
from storage.run import Run
from storage.store import Entry
from tba.errors import Missing

Progress = Callable[[int, int], None]
"""Told how many of how many objects are here."""

LISTED = (
    layout.EVALUATIONS,
    layout.CHECKPOINTS,
    layout.VERSIONS,
    layout.DRAWS,
    layout.STEPS,
    layout.SYNCS,
    layout.TRAJECTORIES,
    layout.PROMPTS,
    layout.ATTEMPTS,
    layout.RETENTION,
    layout.EVENTS,
)
"""What refers is listed before what it refers to, so that a snapshot of a live run names nothing it lacks."""

_COPIES = 16  # objects copied side by side


@dataclass(frozen=True)
class Snapshot:
    """What a run held when it was looked at: local files by key, without the weights."""

    run: Run
    files: Mapping[str, Path]

    def keys(self, prefix: str) -> list[str]:
        return [key for key in self.files if key.startswith(prefix)]

    def read_all(self, prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """The records under a prefix, in the order of their names; Damaged names one that cannot be read."""
        for key in self.keys(prefix):
            try:
                data = self.files[key].read_bytes()
            except FileNotFoundError:  # given up since it was listed
                continue
            yield key, records.decode(data, f"{self.run.url}/{key}")


def take(run: Run, *, progress: Progress | None = None) -> Snapshot:
    """Look at a run now. Of a remote run only what is new since the last time is copied."""
    entries = [entry for prefix in LISTED for entry in run.store.list(prefix) if _wanted(entry.key)]
    if run.store.local_path(layout.RUN) is not None:
        here = {entry.key: run.store.local_path(entry.key) for entry in entries}
        return Snapshot(run, {key: path for key, path in here.items() if path is not None})
    return Snapshot(run, _copy(run, entries, progress or (lambda done, total: None)))


def _wanted(key: str) -> bool:
    """Of the folders that hold weights, only the manifests."""
    return not key.startswith((layout.VERSIONS, layout.CHECKPOINTS)) or key.endswith(f"/{layout.MANIFEST}")


def _copy(run: Run, entries: Sequence[Entry], progress: Progress) -> dict[str, Path]:
    """The content of `run.json` is part of the folder's name: a new run under an old name starts afresh."""
    identity = sha256(run.url.encode() + b"\0" + run.store.read(layout.RUN)).hexdigest()[:16]
    folder = cache_folder("runs") / f"{run.name}-{identity}"
    missing = [entry for entry in entries if _size(folder / entry.key) != entry.size]
    gone: set[str] = set()

    def copy(entry: Entry) -> None:
        try:
            _place(run.store.read(entry.key), folder / entry.key)
        except Missing:  # given up since it was listed
            gone.add(entry.key)

    with ThreadPoolExecutor(_COPIES) as pool:
        for done, _ in enumerate(pool.map(copy, missing), start=1):
            progress(done, len(missing))
    return {entry.key: folder / entry.key for entry in entries if entry.key not in gone}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def _place(data: bytes, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{secrets.token_hex(6)}"
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
