"""Manifest folders: many large files that come into being at once.

The files are stored first, then MANIFEST.json, create-only, with the size and sha256 of each. A folder without a
manifest does not exist; a file that is not what the manifest promises is refused by name.
"""

import contextlib
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from storage import layout, records
from storage.cache import cache_folder
from storage.store import Store, check_key
from tba.errors import AlreadyExists, Damaged, Missing, StorageError
from tba.types import Version

_FOLDER = re.compile(r"(\d+-a\d+)/(.+)")


def publish(store: Store, prefix: str, folder: Path, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Store the files of a local folder, then the manifest, which carries `extra` too; returns the manifest. Hidden
    files and an old manifest are left out. Done if exactly this is stored already; AlreadyExists if other files are.
    """
    files = _describe(folder)
    if not files:
        raise StorageError(f"{store.url}/{prefix}: there is nothing to publish in {folder}")
    manifest = {"files": files, "sha256": _digest(files), "created_at": records.now(), **extra}
    if _is_stored(store, prefix, manifest):
        return manifest
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda file: store.upload(folder / file["name"], prefix + file["name"]), files))
    try:
        store.create(prefix + layout.MANIFEST, records.encode(manifest))
    except AlreadyExists:
        _is_stored(store, prefix, manifest)
    return manifest


def read_manifest(store: Store, prefix: str) -> dict[str, Any] | None:
    try:
        manifest = records.read(store, prefix + layout.MANIFEST, "files", "sha256", "created_at")
    except Missing:
        return None
    for file in manifest["files"]:
        check_key(prefix + file["name"])  # a name decides where `fetch` writes
    return manifest


class Found(NamedTuple):
    """The versions, or checkpoints, under a prefix, oldest first."""

    complete: list[Version]  # with a manifest: these exist
    unfinished: list[Version]  # only files: still being written, or left behind


def survey(store: Store, prefix: str) -> Found:
    files: dict[Version, set[str]] = {}
    for entry in store.list(prefix):
        match = _FOLDER.fullmatch(entry.key.removeprefix(prefix))
        if match:
            files.setdefault(Version.parse(match[1]), set()).add(match[2])
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
    manifest = _existing(store, prefix)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda file: _fetch_file(store, prefix, file, into), manifest["files"]))
    return into


def local_copy(store: Store, prefix: str, *, keep: int = 4) -> Path:
    """A verified folder on this machine's disk: where it lies, for a local store, else one in the cache, which
    keeps the `keep` of each kind used last."""
    in_place = store.local_path(prefix.rstrip("/"))
    if in_place:
        _verify(store, prefix, in_place, _existing(store, prefix))
        return in_place
    manifest = _existing(store, prefix)
    cached = cache_folder(prefix.partition("/")[0]) / manifest["sha256"]
    try:
        _verify(store, prefix, cached, manifest)
    except Damaged:
        _download(store, prefix, cached)
    os.utime(cached)
    _forget_old(cached.parent, keep)
    return cached


def remove(store: Store, prefix: str) -> None:
    """The manifest first: without it the folder does not exist, however far the removal gets."""
    store.delete(prefix + layout.MANIFEST)
    for entry in store.list(prefix):
        store.delete(entry.key)


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


def _fetch_file(store: Store, prefix: str, file: Mapping[str, Any], into: Path) -> None:
    key = prefix + file["name"]
    try:
        store.download(key, into / file["name"])
    except Missing:
        if read_manifest(store, prefix) is None:
            raise Missing(f"{store.url}/{prefix} was removed while it was read") from None
        raise Damaged(f"{store.url}/{key} is gone, but its manifest names it") from None
    _verify_file(store, prefix, into, file)


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


def _download(store: Store, prefix: str, cached: Path) -> None:
    """Into the cache, under its final name only when it is whole; another process may have been faster."""
    temporary = cached.parent / f".{cached.name}.{secrets.token_hex(6)}"
    try:
        fetch(store, prefix, temporary)
        shutil.rmtree(cached, ignore_errors=True)  # there, yet not what the manifest promises
        with contextlib.suppress(FileExistsError):
            temporary.rename(cached)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _forget_old(folder: Path, keep: int) -> None:
    used = sorted(folder.glob("[!.]*"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in used[keep:]:
        shutil.rmtree(path, ignore_errors=True)
