"""Versions that searchers on the trainer's machine load from main memory, before the store has them.

The trainer writes the files of a version into a folder of main memory, and then MANIFEST.json beside them. Each
searcher looks for such manifests, and links the files into a folder of its own: the files stay as long as any process
needs them, and take memory only once. Storage remains the record. So a searcher keeps its trajectories back until the
version is stored, with the digest of what it has loaded (`is_stored`).

Each process holds a lock on its folder. The folders of killed processes are removed when the next searcher or trainer
with versions in memory starts on this machine, of any run of the same user.
"""

import hashlib
import os
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from storage import layout
from storage.local_files.scratch import remove_left, scratch_folder
from storage.local_files.temporary_files import A_DAY
from storage.local_files.verified_files import has_sha256, vouch
from storage.objects import manifest_folders, records
from storage.objects.folder_files import describe_files, digest_of
from storage.runs.attempts import newest_attempt
from storage.runs.run import Run
from storage.weights.versions import Versions, first_of_all
from tba.errors import ConfigError, Damaged, RunFailed, StorageError
from tba.types import Version

MEMORY = Path("/dev/shm")
KEPT = 4
"""Versions for which main memory needs room: two of the trainer, the one that it writes and the one before, and two
that searchers still use."""


@contextmanager
def open_memory(run: Run) -> Iterator["MemoryVersions"]:
    """Yield the versions of a run, with a folder in main memory for this process."""
    with scratch_folder(_shared_folder(run)) as memory:
        yield MemoryVersions(run, memory)


def _shared_folder(run: Run) -> Path:
    """Return the folder in main memory that belongs to a run, after removing what killed processes of this user have
    left in any run's folder."""
    owner = MEMORY / f"tba-{os.getuid()}"
    shared = owner / hashlib.sha256(run.url.encode()).hexdigest()[:16]
    try:
        owner.mkdir(mode=0o700, exist_ok=True)
        about = owner.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
            raise ConfigError(f"sync.transport: {owner} must be a folder that only this user can enter; remove it")
        for folder in owner.iterdir():
            remove_left(folder)
            if time.time() - folder.stat().st_mtime > A_DAY:  # nobody is about to use it
                with suppress(OSError):
                    folder.rmdir()
        shared.mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"sync.transport: shared-memory needs {owner}: {error.strerror}") from error
    return shared


class MemoryVersions(Versions):
    """The versions of a run that are stored, or that the trainer offers in main memory. `memory` is the folder of this
    process in main memory."""

    def __init__(self, run: Run, memory: Path):
        super().__init__(run)
        self._memory = memory
        self._digests: dict[Version, str] = {}  # of the versions that were loaded from memory and are not stored yet

    @property
    def memory(self) -> Path:
        return self._memory

    def check_room(self, nbytes: int, *, differences: bool) -> None:
        """Raise ConfigError if main memory has no room for versions of this size. With `differences`, the trainer also
        keeps the version that they differ from."""
        free, many = shutil.disk_usage(self.memory).free, KEPT + differences
        if free < many * nbytes:
            raise ConfigError(
                f"sync.transport: {MEMORY} has {free / 1e9:.1f} GB free, and shared-memory needs room for {many} "
                f"versions, {many * nbytes / 1e9:.1f} GB"
            )

    def offer(self, version: Version, folder: Path, sha256s: Mapping[str, str] | None = None) -> Mapping[str, str]:
        """Let searchers on this machine load a version from a folder inside `memory`. The trainer has hashed the files
        while it wrote them, so searchers read only files that have changed since."""
        files = describe_files(folder, sha256s)
        manifest = {"version": version.number, "attempt": version.attempt, "files": files, "sha256": digest_of(files)}
        unfinished = folder / f".{layout.MANIFEST}"
        try:
            for file in files:
                vouch(folder / file["name"], file["sha256"])
            unfinished.write_bytes(records.encode(manifest))
            unfinished.rename(folder / layout.MANIFEST)
        except OSError as error:
            raise StorageError(f"{folder}: {error.strerror or error}") from error
        return {file["name"]: file["sha256"] for file in files}

    def complete(self) -> list[Version]:
        """Return the versions that are stored or offered, oldest first. A trainer that another attempt has superseded
        stores no version any more, so what it offers does not count."""
        stored = super().complete()
        offered = self._offered().keys() - stored
        if offered:
            newest = newest_attempt(self.run)
            offered = {version for version in offered if version.attempt >= newest}
        return sorted({*stored, *offered}, key=lambda version: version.order)

    def reference(self) -> Version | None:
        """Return the reference once it is stored: trajectories name it."""
        return first_of_all(super().complete())

    def load(self, version: Version) -> Path:
        """Return the folder of a version: with links to what the trainer offers, or else with what is stored."""
        if offered := self._offered().get(version):
            with suppress(FileNotFoundError):  # withdrawn, so it is stored, or superseded
                return self._link(version, offered)
        return super().load(version)

    def is_stored(self, version: Version) -> bool:
        if version not in self._digests:
            return super().is_stored(version)
        manifest = manifest_folders.read_manifest(self.run.store, layout.version(version))
        if manifest is None and not self._is_pruned(version):
            if (newest := newest_attempt(self.run)) > version.attempt:
                raise RunFailed(f"version {version}, loaded from memory, was not stored before attempt {newest} began")
            return False
        digest = self._digests.pop(version)
        if manifest and manifest["sha256"] != digest:
            raise RunFailed(f"version {version}, loaded from memory, is stored with other content")
        return True

    def _is_pruned(self, version: Version) -> bool:
        """True if a version without a manifest was stored: a trainer stores its versions one after the other."""
        return any(it.attempt == version.attempt and it.number > version.number for it in super().complete())

    def _offered(self) -> dict[Version, Path]:
        offered = dict[Version, Path]()
        for process in self.memory.parent.iterdir():
            with suppress(FileNotFoundError):  # the process has ended meanwhile, or withdrawn the version
                for path in [folder / layout.MANIFEST for folder in process.iterdir()]:
                    if path.exists():
                        manifest = records.decode(path.read_bytes(), str(path), "version", "attempt")
                        offered[Version(manifest["version"], manifest["attempt"])] = path
        return offered

    def _link(self, version: Version, offered: Path) -> Path:
        """Link the files of an offered version into a folder of this process, and verify them."""
        manifest = records.decode(offered.read_bytes(), str(offered), "files", "sha256")
        linked = self.memory / str(version)
        if not linked.exists():
            unfinished = self.memory / f".{version}"
            try:
                for file in manifest["files"]:
                    path = unfinished / file["name"]
                    path.parent.mkdir(parents=True, exist_ok=True)
                    os.link(offered.parent / file["name"], path)
                unfinished.rename(linked)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
        try:
            for file in manifest["files"]:
                _verify(linked, version, file)
        except Damaged:
            shutil.rmtree(linked)
            raise
        self._digests[version] = manifest["sha256"]
        self._forget_links(linked)
        return linked

    def _forget_links(self, newest: Path) -> None:
        """Remove all links but those to the version that was loaded last, and to the one before, which the searcher may
        be adopting now."""
        others = [path for path in self.memory.glob("[!.]*") if path != newest]
        for path in sorted(others, key=lambda path: Version.parse(path.name).order)[:-1]:
            shutil.rmtree(path)


def _verify(folder: Path, version: Version, file: Mapping[str, Any]) -> None:
    path = folder / file["name"]
    if path.stat().st_size != file["bytes"] or not has_sha256(path, file["sha256"], trusts_marks=True):
        raise Damaged(f"{file['name']} of version {version} is in memory, but not as its trainer wrote it: {path}")
