"""Describes and verifies the files of manifest folders by name, size and sha256. Files are read side by side."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from storage import layout
from storage.local_files.regular_files import open_regular, sha256_of_file
from storage.local_files.verified_files import has_sha256
from storage.objects.store import Store
from tba.errors import Damaged

READ_AT_ONCE = 16
"""How many files are read side by side. Python computes a sha256 without its global lock, so threads add up."""


def describe_files(folder: Path, known: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Return name, size and sha256 of each file of a folder, sorted by name. `known` has the sha256 of files that were
    hashed while they were written, by name. The other files are read."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    wanted = [it for it in names if it != layout.MANIFEST and not any(part.startswith(".") for part in it.split("/"))]
    digests = dict(known or {})
    unread = [name for name in wanted if name not in digests]
    with ThreadPoolExecutor(READ_AT_ONCE) as pool:
        digests.update(zip(unread, pool.map(lambda name: sha256_of_file(folder / name), unread), strict=True))
    return [{"name": it, "bytes": (folder / it).stat().st_size, "sha256": digests[it]} for it in wanted]


def digest_of(files: Sequence[Mapping[str, Any]]) -> str:
    """Return the sha256 of a whole folder, computed from the sha256 and the name of each file."""
    return hashlib.sha256("".join(f"{f['sha256']} {f['name']}\n" for f in files).encode()).hexdigest()


def verify_file(store: Store, prefix: str, folder: Path, file: Mapping[str, Any], trusts_marks: bool) -> None:
    """Raise Damaged if a file of a local folder is missing, or differs from its entry in the manifest. With
    `trusts_marks`, a verification by another process of this machine counts (storage/local_files/verified_files.py)."""
    path, name = folder / file["name"], f"{store.url}/{prefix}{file['name']}"
    try:
        with open_regular(path) as content:
            size = os.fstat(content.fileno()).st_size
        if size != file["bytes"]:
            raise Damaged(f"{name} has {size} bytes, but its manifest says {file['bytes']}")
        if not has_sha256(path, file["sha256"], trusts_marks=trusts_marks):
            raise Damaged(f"{name} does not have the content that its manifest promises (sha256 differs)")
    except FileNotFoundError:
        raise Damaged(f"{name} is gone, but its manifest names it") from None
