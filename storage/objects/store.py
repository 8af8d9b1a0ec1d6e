"""The interface of a store: objects under one URL, which is a local folder or an S3 prefix.

Objects are create-only: an object exists when its name exists, and is then complete and never changes. Exceptions are
leases and the control state, which are replaced, and the files of manifest folders, which do not count before their
manifest exists. `create` and `replace` keep this promise, and the rest of storage is built on it.
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
    """Objects by key. Keys are relative, `/`-separated, and validated: no `..`, no empty part, no leading slash."""

    url: str

    def create(self, key: str, data: bytes) -> None:
        """Store a new object completely or not at all. Raise AlreadyExists if the name is taken. If many processes
        create the same name at once, exactly one succeeds. The object is durable when this method returns."""
        ...

    def read(self, key: str) -> bytes:
        """Return the bytes of an object. Raise Missing if there is no such object."""
        ...

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """Return `length` bytes of an object from the byte `start` on, fewer if the object ends before. `length` must
        be at least 1. Raise Missing if there is no such object."""
        ...

    def read_many(self, keys: Sequence[str]) -> Sequence[bytes]:
        """Return the bytes of several objects, in the order of `keys`. Raise Missing if one of them does not exist.
        Objects are read concurrently where that is faster."""
        ...

    def exists(self, key: str) -> bool: ...

    def list(self, prefix: str = "", *, after: str = "") -> list[Entry]:
        """Return the objects whose keys start with `prefix` and sort after `after`, sorted by key. The prefix of a
        folder ends with `/`. Unfinished writes are never listed. The listing of a remote store may lack objects that
        were created just before."""
        ...

    def folders(self, prefix: str = "") -> Sequence[str]:
        """Return the names of the folders directly under a folder, without listing what is in them."""
        ...

    def upload(self, path: Path, key: str, *, may_link: bool = False) -> None:
        """Store a file, which may be large, as one of the files of a manifest folder. The folder exists only once its
        manifest does. The upload may be multipart. An object of the same key is overwritten. With `may_link`, the file
        never changes afterwards: a store on the same disk then links the file instead of copying it."""
        ...

    def download(self, key: str, path: Path) -> None:
        """Copy an object to a file, and make the folders of the file. If the copy fails, the partial file is
        removed."""
        ...

    def delete(self, key: str) -> None:
        """Delete an object. Do nothing if there is no such object."""
        ...

    def unfinished(self, prefix: str = "") -> Sequence[str]:
        """Return the keys under a folder that have unfinished writes, whether abandoned or still under way. Unfinished
        writes hold space, but `list` never shows them."""
        ...

    def discard(self, key: str) -> None:
        """Free the space that unfinished writes of a key hold. A write that is still under way then fails."""
        ...

    def discard_older(self, prefix: str, seconds: float) -> Sequence[str]:
        """Free the space of unfinished writes under a folder that have made no progress for `seconds`. Return their
        keys. A write whose process is known to be alive is left alone."""
        ...

    def irregular(self, prefix: str = "") -> Sequence[str]:
        """Return the keys under a folder at which something lies that is not an object: a named pipe, a device, a
        socket or a broken link. Only a store on a disk can have such keys."""
        ...

    def read_tagged(self, key: str) -> tuple[bytes, str] | None:
        """Return the bytes of an object and the tag that `replace` needs; None if there is no such object."""
        ...

    def replace(self, key: str, data: bytes, *, tag: str | None) -> str:
        """Replace an object if it still has `tag` (compare-and-swap), and return the new tag. If `tag` is None, create
        the object, provided that there is none. Raise Conflict if another writer was first. A conflict can also mean
        that this write succeeded, its answer was lost, and another writer has replaced the object afterwards. So a
        caller that gets a Conflict reads the object again."""
        ...

    def local_path(self, key: str) -> Path | None:
        """Return the path of a key on this machine's disk for a local store; None for a remote store. Nothing need lie
        there."""
        ...


KEY_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+@-]{0,199}")


def check_key(key: str) -> str:
    """Return the key if it names an object inside a store, on a disk as well as in a bucket. Raise StorageError if it
    does not."""
    if len(key) > 800 or not all(KEY_PART.fullmatch(part) for part in key.split("/")):
        raise StorageError(
            f"not a key: {key!r} (parts of letters, digits and '_.=+@-' between single slashes, none starting with '.')"
        )
    return key


def check_prefix(prefix: str) -> str:
    """Return the prefix if it can be the start of a key: complete parts, then perhaps the beginning of a part. Raise
    StorageError if it cannot."""
    if prefix:
        check_key(prefix + "_" if prefix.endswith("/") else prefix)
    return prefix
