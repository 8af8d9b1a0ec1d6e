"""Objects under one URL: a local folder or an S3 prefix, behind one small interface.

Everything but leases and the control state is create-only: a thing exists when its name exists, and is then
complete. That single promise, kept by `create` and `replace`, is what the rest of storage is built on.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from tba.errors import StorageError


class Entry(NamedTuple):
    key: str  # relative to the store's URL
    size: int


class Store(Protocol):
    """Keys are relative, `/`-separated, and validated: no `..`, no empty part, no leading slash."""

    url: str

    def create(self, key: str, data: bytes) -> None:
        """Store a new object, whole or not at all; AlreadyExists if the name is taken. Exactly one of many racing
        creators wins. Durable when it returns."""
        ...

    def read(self, key: str) -> bytes:
        """Missing if there is no such object."""
        ...

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """A part of an object, 1 byte or more: fewer than `length` where it ends before. Missing if it is not there."""
        ...

    def read_many(self, keys: Sequence[str]) -> Sequence[bytes]:
        """Several objects, side by side where that is faster."""
        ...

    def exists(self, key: str) -> bool: ...

    def list(self, prefix: str = "", *, after: str = "") -> list[Entry]:
        """Every object whose key starts with `prefix` (a folder ends with `/`), sorted by key, those after `after`.
        Unfinished writes are never listed. An empty list if there is nothing."""
        ...

    def folders(self, prefix: str = "") -> Sequence[str]:
        """The names of the folders directly under a folder, without looking at all that is in them."""
        ...

    def upload(self, path: Path, key: str) -> None:
        """A large part of an attempt-named folder, which exists only once its manifest does. May be multipart;
        overwrites."""
        ...

    def download(self, key: str, path: Path) -> None:
        """To a file, whose folders are made. One that is not all there is removed."""
        ...

    def delete(self, key: str) -> None:
        """Done if there was nothing."""
        ...

    def unfinished(self, prefix: str = "") -> Sequence[str]:
        """Of which keys under a folder there are writes that hold space and were never finished, or are under way.
        `list` never shows them."""
        ...

    def discard(self, key: str) -> None:
        """Free what unfinished writes of a key hold. One that is still under way fails."""
        ...

    def discard_older(self, prefix: str, seconds: float) -> Sequence[str]:
        """Free what unfinished writes under a folder hold that have made no progress for so many seconds; return their
        keys. A write whose process is known to live is left."""
        ...

    def irregular(self, prefix: str = "") -> Sequence[str]:
        """The keys under a folder at which something lies that is no object: a named pipe, a device, a socket or a
        link that leads nowhere. Only a disk has any."""
        ...

    def read_tagged(self, key: str) -> tuple[bytes, str] | None:
        """A replaceable object and the tag to replace it with; None if there is none."""
        ...

    def replace(self, key: str, data: bytes, *, tag: str | None) -> str:
        """Compare-and-swap: store if the object still has `tag` (None: if there is none). Returns the new tag;
        Conflict if another writer was first. Where an answer was lost that can also be one who has replaced this very
        write since: whoever hears of a conflict reads again."""
        ...

    def local_path(self, key: str) -> Path | None:
        """Where the object lies on this machine's disk, for a local store; None for a remote one."""
        ...


KEY_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+@-]{0,199}")


def check_key(key: str) -> str:
    """The key itself if it names an object inside a store, on a disk as in a bucket; StorageError if not."""
    if len(key) > 800 or not all(KEY_PART.fullmatch(part) for part in key.split("/")):
        raise StorageError(
            f"not a key: {key!r} (parts of letters, digits and '_.=+@-' between single slashes, none starting with '.')"
        )
    return key


def check_prefix(prefix: str) -> str:
    """Likewise for the start of a key: whole parts, then perhaps a part that is not finished."""
    if prefix:
        check_key(prefix + "_" if prefix.endswith("/") else prefix)
    return prefix
