"""Manifest folders: many large files that come into being at once.

The files are stored first, then MANIFEST.json, create-only, with the size and sha256 of each. A folder without a
manifest does not exist; a file that is not what the manifest promises is refused by name.

What an interrupted write left behind cannot be told from what a superseded trainer is still writing. So whoever sweeps
it up looks again for a manifest afterwards, and whoever has stored a manifest looks again for its files: whichever
order the two come in, one of them sees the other's work and removes the rest.
"""

import hashlib
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from storage import layout, records
from storage.cache import shared_copy
from storage.store import Store, check_key
from tba.errors import AlreadyExists, Damaged, DeadlinePassed, Missing, StorageError, Superseded
from tba.types import Version

log = logging.getLogger(__name__)

_COPIES = 4  # of a kind that a cache keeps


def publish(
    store: Store, prefix: str, folder: Path, extra: Mapping[str, Any], *, hand_over: bool = False
) -> dict[str, Any]:
    """Store the files of a local folder, then the manifest, which carries `extra` too; returns the manifest. Hidden
    files and an old manifest are left out. Done if exactly this is stored already; AlreadyExists if other files are;
    Superseded if the files were swept up meanwhile. With `hand_over` nobody on this machine has to fetch it: no file
    of the folder may change afterwards."""
    files = _describe(folder)
    if not files:
        raise StorageError(f"{store.url}/{prefix}: there is nothing to publish in {folder}")
    manifest = {"files": files, "sha256": _digest(files), "created_at": records.now(), **extra}
    if _is_stored(store, prefix, manifest):
        return manifest
    if hand_over and store.local_path(prefix.rstrip("/")) is None:
        _hand_over(prefix, folder, manifest)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda file: store.upload(folder / file["name"], prefix + file["name"]), files))
    try:
        store.create(prefix + layout.MANIFEST, records.encode(manifest))
    except AlreadyExists:
        _is_stored(store, prefix, manifest)
    else:
        _look_again(store, prefix, files)
    return manifest


def read_manifest(store: Store, prefix: str) -> dict[str, Any] | None:
    try:
        manifest = records.read(store, prefix + layout.MANIFEST, "files", "sha256", "created_at")
    except Missing:
        return None
    try:
        for file in manifest["files"]:
            check_key(prefix + file["name"])  # a name decides where `fetch` writes
        if manifest["sha256"] != _digest(manifest["files"]):  # it decides which copy in the cache is this one
            raise Damaged(f"{store.url}/{prefix}{layout.MANIFEST}: its sha256 is not that of the files it names")
    except (TypeError, KeyError) as error:
        raise Damaged(f"{store.url}/{prefix}{layout.MANIFEST} does not say which files there are: {error!r}") from None
    return manifest


class Found(NamedTuple):
    """The versions, or checkpoints, under a prefix, oldest first."""

    complete: list[Version]  # with a manifest: these exist
    unfinished: list[Version]  # only files: still being written, or left behind


def survey(store: Store, prefix: str) -> Found:
    files: dict[Version, set[str]] = {}
    for entry in store.list(prefix):
        if place := layout.parse_folder(entry.key):
            files.setdefault(place[0], set()).add(place[1])
    oldest_first = sorted(files, key=lambda it: it.order)
    return Found(
        complete=[it for it in oldest_first if layout.MANIFEST in files[it]],
        unfinished=[it for it in oldest_first if layout.MANIFEST not in files[it]],
    )


def complete(store: Store, prefix: str) -> list[Version]:
    """Those that exist, oldest first."""
    return survey(store, prefix).complete


def fetch(store: Store, prefix: str, into: Path) -> Path:
    """Bring a folder here and verify it. Missing if it does not exist, also when it is removed meanwhile; Damaged,
    naming the file, if one is not what the manifest promises."""
    return _fetch(store, prefix, _existing(store, prefix), into)


def local_copy(store: Store, prefix: str, *, keep: int = _COPIES) -> Path:
    """A verified folder on this machine's disk: where it lies, for a local store, else one in the cache, which
    keeps the `keep` of each kind used last, and what any process was given last."""
    manifest = _existing(store, prefix)
    in_place = store.local_path(prefix.rstrip("/"))
    if in_place:
        try:
            _verify(store, prefix, in_place, manifest)
        except Damaged:
            _existing(store, prefix)  # Missing, if it was removed while it was read
            raise
        return in_place
    return shared_copy(
        prefix.partition("/")[0],
        manifest["sha256"],
        whole=lambda copy: _is_whole(store, prefix, copy, manifest),
        make=lambda copy: _fetch(store, prefix, manifest, copy),
        keep=keep,
    )


def remove(store: Store, prefix: str) -> None:
    """The manifest first: without it the folder does not exist, however far the removal gets."""
    store.delete(prefix + layout.MANIFEST)
    for entry in store.list(prefix):
        store.delete(entry.key)
    for key in store.unfinished(prefix):
        store.discard(key)


def left_behind(store: Store, prefix: str, found: Found) -> list[Version]:
    """What may be swept up: neither complete nor newer than all that is, be it no more than an unfinished upload."""
    begun = {place[0] for key in store.unfinished(prefix) if (place := layout.parse_folder(key))}
    older = {it for it in {*begun, *found.unfinished} if found.complete and it.order < found.complete[-1].order}
    return sorted(older - {*found.complete}, key=lambda it: it.order)


def sweep(store: Store, prefix: str) -> bool:
    """Remove what has no manifest. False if one has appeared meanwhile: then it is still to be removed."""
    stored = [entry.key for entry in store.list(prefix)]
    if prefix + layout.MANIFEST in stored or store.exists(prefix + layout.MANIFEST):  # the listing may be older
        return True  # it was being written, and is complete now
    for key in stored:
        store.delete(key)
    for key in store.unfinished(prefix):
        store.discard(key)
    return not store.exists(prefix + layout.MANIFEST)


def _look_again(store: Store, prefix: str, files: Sequence[Mapping[str, Any]]) -> None:
    stored = {entry.key for entry in store.list(prefix)}
    unlisted = [prefix + file["name"] for file in files if prefix + file["name"] not in stored]
    if not all(store.exists(key) for key in unlisted):  # the listing may be older than they are
        remove(store, prefix)
        raise Superseded(f"{store.url}/{prefix} was swept up while it was written: a later attempt has taken over")


def _describe(folder: Path) -> list[dict[str, Any]]:
    """Name, size and sha256 of each file, by name."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return [
        {"name": name, "bytes": (folder / name).stat().st_size, "sha256": _sha256(folder / name)}
        for name in names
        if name != layout.MANIFEST and not any(part.startswith(".") for part in name.split("/"))
    ]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(files: Sequence[Mapping[str, Any]]) -> str:
    """Of the whole folder: over the digests and names of its files."""
    return hashlib.sha256("".join(f"{f['sha256']} {f['name']}\n" for f in files).encode()).hexdigest()


def _is_stored(store: Store, prefix: str, manifest: Mapping[str, Any]) -> bool:
    stored = read_manifest(store, prefix)
    if stored is None:
        return False
    if stored["files"] != manifest["files"]:
        raise AlreadyExists(f"{store.url}/{prefix} exists already, with other content")
    return True


def _existing(store: Store, prefix: str) -> dict[str, Any]:
    manifest = read_manifest(store, prefix)
    if manifest is None:
        raise Missing(f"{store.url}/{prefix} does not exist: it has no {layout.MANIFEST}")
    return manifest


def _fetch(store: Store, prefix: str, manifest: Mapping[str, Any], into: Path) -> Path:
    into.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda file: _fetch_file(store, prefix, file, into), manifest["files"]))
    return into


def _fetch_file(store: Store, prefix: str, file: Mapping[str, Any], into: Path) -> None:
    key = prefix + file["name"]
    try:
        store.download(key, into / file["name"])
    except Missing:
        if read_manifest(store, prefix) is None:
            raise Missing(f"{store.url}/{prefix} was removed while it was read") from None
        raise Damaged(f"{store.url}/{key} is gone, but its manifest names it") from None
    _verify_file(store, prefix, into, file)


def _hand_over(prefix: str, folder: Path, manifest: Mapping[str, Any]) -> None:
    """Into the cache, before it can be asked for. Whoever finds it there verifies it as what was fetched. Where that
    cannot be done at once, it will be fetched."""

    def link(copy: Path) -> None:
        for file in manifest["files"]:
            (copy / file["name"]).parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(folder / file["name"], copy / file["name"])
            except OSError:  # the cache is on another disk
                shutil.copyfile(folder / file["name"], copy / file["name"])

    try:
        shared_copy(
            prefix.partition("/")[0], manifest["sha256"], whole=Path.is_dir, make=link, keep=_COPIES, deadline=0.0
        )
    except (StorageError, DeadlinePassed) as error:
        log.warning("%s is not kept on this machine: %s", prefix, error)


def _is_whole(store: Store, prefix: str, folder: Path, manifest: Mapping[str, Any]) -> bool:
    try:
        _verify(store, prefix, folder, manifest)
    except Damaged:
        return False
    return folder.is_dir()


def _verify(store: Store, prefix: str, folder: Path, manifest: Mapping[str, Any]) -> None:
    for file in manifest["files"]:
        _verify_file(store, prefix, folder, file)


def _verify_file(store: Store, prefix: str, folder: Path, file: Mapping[str, Any]) -> None:
    path, name = folder / file["name"], f"{store.url}/{prefix}{file['name']}"
    try:
        size = path.stat().st_size
        if size != file["bytes"]:
            raise Damaged(f"{name} has {size} bytes, its manifest says {file['bytes']}")
        if _sha256(path) != file["sha256"]:
            raise Damaged(f"{name} has not the content that its manifest promises (sha256 differs)")
    except FileNotFoundError:
        raise Damaged(f"{name} is gone, but its manifest names it") from None
