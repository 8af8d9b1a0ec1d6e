"""Published policies. Each version is one manifest folder, named after the sync that it follows and the attempt that
made it."""

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from storage import layout
from storage.objects import manifest_folders, records
from storage.runs import retention
from storage.runs.run import Run
from tba.errors import Damaged, Missing
from tba.types import Base, Version


class Versions:
    """Stores and fetches the versions of a run; see `VersionStore` in tba/interfaces.py."""

    def __init__(self, run: Run):
        self.run = run
        self._steps: dict[Version, int] = {}
        self._bases: dict[Version, Version | None] = {}

    @property
    def memory(self) -> Path | None:
        """The folder of this process in main memory, if versions are handed over there."""
        return None

    def publish(
        self,
        version: Version,
        *,
        step: int,
        folder: Path,
        weights_sha256: str,
        changed_share: float | None = None,
        base: Base | None = None,
        sha256s: Mapping[str, str] | None = None,
    ) -> bool:
        sha256s = self.offer(version, folder, sha256s)
        extra = {
            "version": version.number, "attempt": version.attempt, "step": step, "weights_sha256": weights_sha256,
            "changed_share": changed_share,
        }  # fmt: skip
        manifest = manifest_folders.publish(
            self.run.store,
            layout.version(version),
            folder,
            extra,
            sha256s=sha256s,
            hand_over=self.memory is None,
            base=(str(base.version), base.folder) if base else None,
        )
        return "difference" not in manifest

    def offer(
        self, version: Version, folder: Path, sha256s: Mapping[str, str] | None = None
    ) -> Mapping[str, str] | None:
        """Let searchers load a version that is about to be stored, if they can do so before it is stored. Return the
        sha256 of the files that have been hashed, by name."""
        return sha256s

    def complete(self) -> list[Version]:
        """Return all complete versions, oldest first."""
        return manifest_folders.complete(self.run.store, layout.VERSIONS)

    def newest(self) -> Version | None:
        return max(self.complete(), key=lambda version: version.order, default=None)

    def reference(self) -> Version | None:
        return first_of_all(self.complete())

    def step(self, version: Version) -> int:
        """Return the gradient step that a version follows. Raise Missing if the version was never published or has been
        pruned."""
        if version not in self._steps:
            manifest = manifest_folders.read_manifest(self.run.store, layout.version(version))
            if manifest is None:
                raise Missing(f"{self.run.url} has no version {version}")
            with records.reading(f"{self.run.url}/{layout.version(version)}{layout.MANIFEST}"):
                [self._steps[version]] = records.integers(manifest, "step")
        return self._steps[version]

    def weights_sha256(self, version: Version) -> str | None:
        """Return the digest of the trainer's weights at the time when a version was published; None if the version is
        not stored or its manifest does not have the digest."""
        manifest = manifest_folders.read_manifest(self.run.store, layout.version(version))
        return manifest.get("weights_sha256") if manifest else None

    def load(self, version: Version) -> Path:
        return manifest_folders.local_copy(self.run.store, layout.version(version), trusts_marks=True)

    def is_stored(self, version: Version) -> bool:
        return True  # it was loaded from the store

    def base(self, version: Version) -> Version | None:
        """Return the base of a version that is stored as a difference; None if the version is stored whole, or if its
        manifest is missing or damaged."""
        if version not in self._bases:
            with suppress(Damaged):
                manifest = manifest_folders.read_manifest(self.run.store, layout.version(version)) or {}
                difference = manifest.get("difference")
                self._bases[version] = Version.parse(difference["base"]) if difference else None
        return self._bases.get(version)

    def prune(self, *, keep: int, every: int) -> list[Version]:
        """Remove the versions that nothing needs, and return the removed versions. Four kinds stay: the newest `keep`;
        every `every`-th, which the evaluator scores (this includes version 0, the reference); each version with a
        checkpoint of the same name; and each whole version from which a kept version is stored as a difference. With
        `sync.lag`, a version of an earlier attempt stays too if its number is among the newest `keep`, because a round
        may need it."""
        found = manifest_folders.survey(self.run.own, layout.VERSIONS)
        in_step = self.run.config.get("sync", {}).get("lag") is not None
        newest = found.complete[-1].number if in_step and found.complete else -1
        recent = {version for version in found.complete if newest - keep < version.number <= newest}
        every_th = {version for version in found.complete if version.number % every == 0}

        def kept() -> set[Version]:
            with_checkpoint = manifest_folders.complete(self.run.store, layout.CHECKPOINTS)
            needed = {*every_th, *recent, *found.complete[-keep:], *with_checkpoint} & {*found.complete}
            return {*needed, *(base for version in needed if (base := self.base(version)))}

        why = f"versions beyond the newest {keep} and each {every}th"
        removed = retention.keep_only(self.run, layout.VERSIONS, found, kept, why=why)
        return removed + (self._prune_stranded(removed) if removed else [])

    def _prune_stranded(self, removed: Collection[Version]) -> list[Version]:
        """Remove the versions that a superseded trainer has just stored as differences from a version in `removed`, and
        return them. If that trainer stores such a version only later, it removes the version itself, because it looks
        for the base after storing."""
        complete = manifest_folders.complete(self.run.own, layout.VERSIONS)
        stranded = [version for version in complete if self.base(version) in removed]
        found = manifest_folders.VersionFolders(complete=stranded, unfinished=[])
        return retention.keep_only(self.run, layout.VERSIONS, found, set, why="their base was removed meanwhile")


def first_of_all(versions: Iterable[Version]) -> Version | None:
    """Return version 0 of the earliest attempt; None if there is none."""
    return min((v for v in versions if v.number == 0), key=lambda version: version.attempt, default=None)
