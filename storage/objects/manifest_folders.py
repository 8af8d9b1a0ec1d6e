"""Stores and fetches manifest folders: folders of large files, all of which come into existence at the same moment.

The files are stored first. MANIFEST.json follows, create-only, with the size and sha256 of each file. A folder without
a manifest does not exist. A file that does not match the manifest is refused, and the error names the file.

A folder may be stored as the *difference* from another folder of its kind, its *base*, which is stored whole. If both
folders have a file of the same name and size, only the difference of the two files is stored
(storage/objects/deltas.py). The manifest always gives the size and sha256 of the full files. For a folder that is
stored as a difference it also lists the differences that are stored instead.

Files that an interrupted write has left look like files that a superseded trainer is still writing. So a process that
removes such files looks for a manifest again afterwards, and a process that has stored a manifest looks for its files
again. Whichever of the two comes first, the other one sees what it did and removes the rest.
"""

import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from storage import layout
from storage.local_files.scratch import scratch_folder
from storage.local_files.shared_cache import shared_copy
from storage.local_files.verified_files import settle
from storage.objects import deltas, records
from storage.objects.folder_files import READ_AT_ONCE, describe_files, digest_of, verify_file
from storage.objects.store import Store, check_key
from tba.errors import AlreadyExists, Damaged, DeadlinePassed, Missing, StorageError, Superseded
from tba.types import Version

log = logging.getLogger(__name__)

_COPIES = 4  # folders of each kind that the cache keeps
_MOVED_AT_ONCE = 4  # files that are uploaded or fetched side by side; a remote store moves each in several parts


def publish(
    store: Store,
    prefix: str,
    folder: Path,
    extra: Mapping[str, Any],
    *,
    sha256s: Mapping[str, str] | None = None,
    stored: Sequence[Mapping[str, Any]] = (),
    may_link: bool = False,
    hand_over: bool = False,
    base: tuple[str, Path] | None = None,
) -> dict[str, Any]:
    """Store the files of a local folder, then the manifest, which also carries `extra`. Return the manifest.

    Hidden files and an old manifest are left out. If exactly these files are stored already, nothing is stored. Raise
    AlreadyExists if other files are stored. Raise Superseded if another process removes the files, or the base, during
    the call.

    `sha256s` has the digests of files that were hashed while they were written, by name; the other files are read for
    theirs. `stored` has the name, size and sha256 of each file that was stored before this call and is not in the local
    folder. With `may_link`, no file of the local folder ever changes afterwards, so that a store on the same disk links
    the files instead of copying them. `hand_over` also puts the files into this machine's cache, so that processes on
    this machine need not fetch them; it implies `may_link`. `base` is the name of a stored folder and the path of its
    files. The difference from the base is stored if that takes less than half of the bytes."""
    files = sorted([*describe_files(folder, sha256s), *map(dict, stored)], key=lambda file: file["name"])
    if not files:
        raise StorageError(f"{store.url}/{prefix}: there is nothing to publish in {folder}")
    if before := _stored(store, prefix, files):
        return before
    manifest = {"files": files, "sha256": digest_of(files), "created_at": records.now(), **extra}
    with scratch_folder() as scratch:
        if base:
            manifest |= _difference(files, folder, *base, scratch)
        if hand_over and ("difference" in manifest or store.local_path(prefix.rstrip("/")) is None):
            _hand_over(prefix, folder, manifest)

        def upload(file: Mapping[str, Any]) -> None:
            path = (scratch if "of" in file else folder) / file["name"]
            store.upload(path, prefix + file["name"], may_link=may_link or hand_over)

        with ThreadPoolExecutor(_MOVED_AT_ONCE) as pool:
            there = {file["name"] for file in stored}
            list(pool.map(upload, [file for file in stored_files(manifest) if file["name"] not in there]))
    try:
        store.create(prefix + layout.MANIFEST, records.encode(manifest))
    except AlreadyExists:
        return _stored(store, prefix, files) or manifest
    _look_again(store, prefix, manifest)
    return manifest


def read_manifest(store: Store, prefix: str) -> dict[str, Any] | None:
    try:
        manifest = records.read(store, prefix + layout.MANIFEST, "files", "sha256", "created_at")
    except Missing:
        return None
    try:
        for file in [*manifest["files"], *stored_files(manifest)]:
            _check_name(store, prefix, file["name"])
            if type(file["bytes"]) is not int or not isinstance(file["sha256"], str):
                raise TypeError(f"of {file['name']}")
        if "difference" in manifest:
            Version.parse(manifest["difference"]["base"])  # the name of the base decides where `fetch` reads
        if manifest["sha256"] != digest_of(manifest["files"]):  # this sha256 names the folder's copy in the cache
            raise Damaged(f"{store.url}/{prefix}{layout.MANIFEST}: its sha256 does not match the list of its files")
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise Damaged(f"{store.url}/{prefix}{layout.MANIFEST} has an invalid list of files: {error!r}") from None
    return manifest


def _check_name(store: Store, prefix: str, name: str) -> None:
    """Raise Damaged if a name in a manifest is not the name of a file inside the folder. The name decides where `fetch`
    writes."""
    try:
        check_key(prefix + name)
    except StorageError as error:
        raise Damaged(f"{store.url}/{prefix}{layout.MANIFEST} names {error}") from None


def stored_files(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return name, size and sha256 of each stored object: a file, or the difference that is stored instead of the
    file."""
    instead = {it["of"]: it for it in manifest["difference"]["files"]} if "difference" in manifest else {}
    return [instead.get(file["name"], file) for file in manifest["files"]]


class VersionFolders(NamedTuple):
    """The versions, or checkpoints, under a prefix, oldest first."""

    complete: list[Version]  # have a manifest, so they exist
    unfinished: list[Version]  # have files but no manifest: they are still being written, or were left behind


def survey(store: Store, prefix: str) -> VersionFolders:
    files: dict[Version, set[str]] = {}
    for entry in store.list(prefix):
        if place := layout.parse_folder(entry.key):
            files.setdefault(place[0], set()).add(place[1])
    oldest_first = sorted(files, key=lambda it: it.order)
    return VersionFolders(
        complete=[it for it in oldest_first if layout.MANIFEST in files[it]],
        unfinished=[it for it in oldest_first if layout.MANIFEST not in files[it]],
    )


def check_sizes(store: Store, prefix: str) -> None:
    """Raise Missing if the folder does not exist, and Damaged if a file is missing or has another size than its
    manifest says. No file is read."""
    sizes = {entry.key: entry.size for entry in store.list(prefix)}
    for file in stored_files(_existing(store, prefix)):
        key = prefix + file["name"]
        if sizes.get(key) != file["bytes"]:
            raise Damaged(f"{store.url}/{key} has {sizes.get(key, 'no')} bytes, but its manifest says {file['bytes']}")


def complete(store: Store, prefix: str) -> list[Version]:
    """Return the versions, or checkpoints, that exist under a prefix, oldest first."""
    return survey(store, prefix).complete


def fetch(store: Store, prefix: str, into: Path) -> Path:
    """Copy the files of a folder into the local folder `into`, verify the copy, and return `into`. Raise Missing if the
    folder does not exist, or is removed during the copying. Raise Damaged, naming the file, if a file does not match
    the manifest."""
    manifest = _existing(store, prefix)
    return _fetch(store, prefix, manifest, _base(store, prefix, manifest, False), into, sets_marks=False)


def local_copy(store: Store, prefix: str, *, keep: int = _COPIES, trusts_marks: bool = False) -> Path:
    """Return the path of a verified folder on this machine's disk. If a local store has the folder whole, this is the
    stored folder itself, otherwise a copy in the cache. Of each kind, the cache keeps the `keep` copies that were used
    last, and copies that processes still use. With `trusts_marks`, files that another process of this machine has
    verified are not read again (storage/local_files/verified_files.py)."""
    return _local_copy(store, prefix, _existing(store, prefix), keep, trusts_marks)


def _local_copy(store: Store, prefix: str, manifest: Mapping[str, Any], keep: int, trusts_marks: bool) -> Path:
    in_place = store.local_path(prefix.rstrip("/"))
    if in_place and "difference" not in manifest:
        try:
            _verify(store, prefix, in_place, manifest, trusts_marks)
        except Damaged:
            _existing(store, prefix)  # raises Missing if the folder was removed while it was read
            raise
        return in_place
    base = cache(lambda: _base(store, prefix, manifest, trusts_marks))
    return shared_copy(
        prefix.partition("/")[0],
        manifest["sha256"],
        whole=lambda copy: _is_whole(store, prefix, copy, manifest, trusts_marks),
        prepare=base,
        make=lambda copy: _fetch(store, prefix, manifest, base(), copy, sets_marks=trusts_marks),
        keep=keep,
    )


def remove(store: Store, prefix: str) -> None:
    """Remove a folder. The manifest goes first: without it the folder does not exist, even if the removal is
    interrupted."""
    store.delete(prefix + layout.MANIFEST)
    for entry in store.list(prefix):
        store.delete(entry.key)
    for key in store.unfinished(prefix):
        store.discard(key)


def left_behind(store: Store, prefix: str, found: VersionFolders) -> list[Version]:
    """Return the folders that `sweep` may remove: those without a manifest that are older than the newest complete
    folder. Folders of which there are only unfinished uploads count too."""
    begun = {place[0] for key in store.unfinished(prefix) if (place := layout.parse_folder(key))}
    older = {it for it in {*begun, *found.unfinished} if found.complete and it.order < found.complete[-1].order}
    return sorted(older - {*found.complete}, key=lambda it: it.order)


def sweep(store: Store, prefix: str) -> bool:
    """Remove the files of a folder that has no manifest, and return True. If the folder has a manifest after all, leave
    it and return True. Return False if a manifest appeared while files were removed: the caller must then remove the
    folder."""
    stored = [entry.key for entry in store.list(prefix)]
    if prefix + layout.MANIFEST in stored or store.exists(prefix + layout.MANIFEST):  # it may be newer than `stored`
        return True  # another process was still writing the folder, and has completed it
    for key in stored:
        store.delete(key)
    for key in store.unfinished(prefix):
        store.discard(key)
    return not store.exists(prefix + layout.MANIFEST)


def _look_again(store: Store, prefix: str, manifest: Mapping[str, Any]) -> None:
    stored = {entry.key for entry in store.list(prefix)}
    needed = [prefix + file["name"] for file in stored_files(manifest)]
    if base := _base_prefix(prefix, manifest):
        needed.append(base + layout.MANIFEST)
    unlisted = [key for key in needed if key not in stored]
    if not all(store.exists(key) for key in unlisted):  # an object may be newer than the listing
        remove(store, prefix)
        raise Superseded(f"{store.url}/{prefix} was removed while it was written: a later attempt has taken over")


def _difference(
    files: Sequence[Mapping[str, Any]], folder: Path, name: str, base: Path, scratch: Path
) -> dict[str, Any]:
    """Write the differences from a base into `scratch`, and return the entry of the manifest that describes them.
    Return an empty dict if the folder should be stored whole, because the differences would not halve its size."""
    for file in files:
        theirs, ours = base / file["name"], scratch / f"{file['name']}{deltas.SUFFIX}"
        if theirs.is_file() and theirs.stat().st_size == file["bytes"]:
            ours.parent.mkdir(parents=True, exist_ok=True)
            deltas.write(theirs, folder / file["name"], ours)
    instead = [{**it, "of": it["name"].removesuffix(deltas.SUFFIX)} for it in describe_files(scratch)]
    said = {"difference": {"base": name, "files": instead}}
    stored = stored_files({"files": files, **said})
    return said if 2 * sum(it["bytes"] for it in stored) < sum(it["bytes"] for it in files) else {}


def _stored(store: Store, prefix: str, files: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the manifest if exactly these files are stored; None if there is no manifest. Raise AlreadyExists if
    other files are stored."""
    stored = read_manifest(store, prefix)
    if stored and stored["files"] != files:
        raise AlreadyExists(f"{store.url}/{prefix} exists already with other content")
    return stored


def _base_prefix(prefix: str, manifest: Mapping[str, Any]) -> str | None:
    return f"{prefix.partition('/')[0]}/{manifest['difference']['base']}/" if "difference" in manifest else None


def _base(store: Store, prefix: str, manifest: Mapping[str, Any], trusts_marks: bool) -> Path | None:
    """Return the verified files of a folder's base; None if the folder is stored whole."""
    base = _base_prefix(prefix, manifest)
    if base is None:
        return None
    try:
        theirs = _existing(store, base)
        if "difference" in theirs:
            raise Damaged(f"{store.url}/{base} is not stored whole")
        return _local_copy(store, base, theirs, _COPIES, trusts_marks)
    except (Missing, Damaged) as error:
        _existing(store, prefix)  # raises Missing if both folders were removed while they were read
        raise Damaged(f"{store.url}/{prefix} is stored as the difference from an unusable base: {error}") from error


def _existing(store: Store, prefix: str) -> dict[str, Any]:
    manifest = read_manifest(store, prefix)
    if manifest is None:
        raise Missing(f"{store.url}/{prefix} does not exist: it has no {layout.MANIFEST}")
    return manifest


def _fetch(
    store: Store, prefix: str, manifest: Mapping[str, Any], base: Path | None, into: Path, *, sets_marks: bool
) -> Path:
    """Fetch and verify the files of a folder. With `sets_marks`, other processes of this machine can trust that."""

    def verify(file: Mapping[str, Any]) -> None:
        if sets_marks:
            settle(into / file["name"])
        verify_file(store, prefix, into, file, sets_marks)

    def fetch_file(file: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
        _download(store, prefix, stored["name"], into)
        verify(stored)
        if base and "of" in stored:
            deltas.apply(base / file["name"], into / stored["name"], into / file["name"])
            (into / stored["name"]).unlink()
            verify(file)

    into.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(_MOVED_AT_ONCE) as pool:
        list(pool.map(fetch_file, manifest["files"], stored_files(manifest)))
    return into


def _download(store: Store, prefix: str, name: str, into: Path) -> None:
    try:
        store.download(prefix + name, into / name)
    except Missing:
        if read_manifest(store, prefix) is None:
            raise Missing(f"{store.url}/{prefix} was removed while it was read") from None
        raise Damaged(f"{store.url}/{prefix}{name} is gone, but its manifest names it") from None


def _hand_over(prefix: str, folder: Path, manifest: Mapping[str, Any]) -> None:
    """Put the files of a folder into the cache before another process can ask for the folder. A process that finds them
    there verifies them like fetched files. If the cache cannot take them at once, log a warning; processes then fetch
    the folder."""

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
        log.warning("%s cannot be kept in the cache of this machine: %s", prefix, error)


def _is_whole(store: Store, prefix: str, folder: Path, manifest: Mapping[str, Any], trusts_marks: bool) -> bool:
    try:
        _verify(store, prefix, folder, manifest, trusts_marks)
    except Damaged:
        return False
    return folder.is_dir()


def _verify(store: Store, prefix: str, folder: Path, manifest: Mapping[str, Any], trusts_marks: bool) -> None:
    with ThreadPoolExecutor(READ_AT_ONCE) as pool:
        list(pool.map(lambda file: verify_file(store, prefix, folder, file, trusts_marks), manifest["files"]))
