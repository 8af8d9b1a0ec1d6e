"""Checks versions and checkpoints, which are manifest folders, and the evaluations of versions."""

from collections.abc import Callable, Collection
from typing import Any

from storage import layout
from storage.local_files.scratch import scratch_folder
from storage.maintenance.check.context import CheckContext
from storage.objects import manifest_folders
from storage.objects.store import check_key
from storage.queries import evaluation_tables, tables
from storage.queries.tables import fitting
from storage.runs.retention import GivenUp, given_up
from storage.weights.checkpoints import Checkpoints
from storage.weights.evaluations import named_before
from tba.errors import Damaged, Missing, StorageError
from tba.types import Version

Manifest = dict[str, Any]
CheckManifest = Callable[[Version, Manifest], Version]
"""Checks a manifest, given the name of its folder. Returns the name that the manifest states."""


def check_versions(context: CheckContext, removed: GivenUp) -> dict[Version, str | None]:
    """Check the versions. Return each complete version with the sha256 of its weights, which the ledger has too, or
    None if its manifest does not have the sha256. Versions in `removed` are given up and may just be removed."""
    digests: dict[Version, str | None] = {}

    def check_manifest(version: Version, manifest: Manifest) -> Version:
        fitting([tables.version_row(version, manifest)], tables.VERSIONS)
        digests[version] = manifest.get("weights_sha256")
        return Version(manifest["version"], manifest["attempt"])

    found = _check_folders(context, layout.VERSIONS, removed.versions, check_manifest)
    return {version: digests.get(version) for version in found}


def check_checkpoints(context: CheckContext, removed: GivenUp) -> list[Version]:
    """Check the checkpoints, and return the complete ones. Checkpoints in `removed` are given up and may just be
    removed."""

    def check_manifest(checkpoint: Version, manifest: Manifest) -> Version:
        fitting([tables.checkpoint_row(checkpoint, manifest)], tables.CHECKPOINTS)
        Checkpoints(context.run).check_manifest(checkpoint)
        return Version(manifest["sync"], manifest["attempt"])

    return _check_folders(context, layout.CHECKPOINTS, removed.checkpoints, check_manifest)


def check_evaluations(context: CheckContext, published: Collection[Version]) -> list[Version]:
    """Check the evaluations and their examples. Each must be of a version in `published`, those that are stored or
    given up. Return the versions that were evaluated."""
    findings = context.findings
    evaluated: list[Version] = []
    for key in context.listed[layout.EVALUATIONS]:
        with findings.looking_at(key):
            record = context.records.decode(key, "version", "attempt", "step", "scores")
            if before := named_before(record):
                context.records.link(key, layout.evaluation(before), record["previous"].get("sha256"))
            version = Version(record["version"], record["attempt"])
            if key != layout.evaluation(version):
                findings.report(key, f"is the record of another version, {version}")
            if version not in published:
                findings.report(key, f"evaluates version {version}, which is neither stored nor given up")
            if not fitting(evaluation_tables.score_rows(record, key), evaluation_tables.EVALUATIONS):
                findings.report(key, "has no scores")
            fitting(evaluation_tables.example_rows(record, key), evaluation_tables.EXAMPLES)
            evaluated.append(version)
    findings.count("evaluations", len(evaluated))
    return evaluated


def _check_folders(
    context: CheckContext, prefix: str, removed: Collection[Version], check_manifest: CheckManifest
) -> list[Version]:
    """Check the files of each folder under `prefix`. Return the names of the folders that have a manifest."""
    findings, listed = context.findings, context.listed[prefix]
    complete: list[Version] = []
    for name in sorted({place[0] for key in listed if (place := layout.parse_folder(key))}):
        folder = f"{prefix}{name}/"
        if f"{folder}{layout.MANIFEST}" not in listed:
            findings.note(f"{folder} {'is being removed' if name in removed else 'is unfinished: it has no manifest'}")
            continue
        complete.append(name)
        with findings.looking_at(folder):
            try:
                _check_folder(context, folder, name, check_manifest)
            except (Missing, Damaged):
                if not _is_being_removed(context, prefix, name):
                    raise
                findings.note(f"{folder} is being removed")
    findings.count(prefix.rstrip("/"), len(complete))
    return complete


def _check_folder(context: CheckContext, folder: str, name: Version, check_manifest: CheckManifest) -> None:
    store = context.run.store
    manifest = context.records.decode(folder + layout.MANIFEST, "files", "sha256", "attempt")
    for file in manifest["files"]:
        _check_file_name(folder, file["name"])
    if (said := check_manifest(name, manifest)) != name:
        raise Damaged(f"its manifest says it is {said}")
    if store.local_path(folder.rstrip("/")) is not None and "difference" not in manifest:
        manifest_folders.local_copy(store, folder)
    else:
        with scratch_folder() as scratch:
            manifest_folders.fetch(store, folder, scratch)


def _check_file_name(folder: str, name: str) -> None:
    try:
        check_key(folder + name)
    except StorageError as error:
        raise Damaged(f"its manifest names {error}") from None


def _is_being_removed(context: CheckContext, prefix: str, name: Version) -> bool:
    """True if a folder is given up and has just lost its manifest. A folder that is given up but that a fork needs
    keeps its manifest."""
    if context.run.store.exists(f"{prefix}{name}/{layout.MANIFEST}"):
        return False
    removed = given_up(context.run)
    return name in (removed.versions if prefix == layout.VERSIONS else removed.checkpoints)
