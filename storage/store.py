"""Objects under one URL: a local folder or an S3 prefix, behind one small interface.

Everything but leases and the control state is create-only: a thing exists when its name exists, and is then
complete. That single promise, kept by `create` and `replace`, is what the rest of storage is built on.
"""

from pathlib import Path
from typing import NamedTuple, Protocol


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

    def exists(self, key: str) -> bool: ...

    def list(self, prefix: str = "", *, after: str = "") -> list[Entry]:
        """Every object whose key starts with `prefix` (a folder ends with `/`), sorted by key, those after `after`.
        Unfinished writes are never listed. An empty list if there is nothing."""
        ...

    def upload(self, path: Path, key: str) -> None:
        """A large part of an attempt-named folder, which exists only once its manifest does. May be multipart;
        overwrites."""
        ...

    def download(self, key: str, path: Path) -> None: ...

    def delete(self, key: str) -> None:
        """Done if there was nothing."""
        ...

    def read_tagged(self, key: str) -> tuple[bytes, str] | None:
        """A replaceable object and the tag to replace it with; None if there is none."""
        ...

    def replace(self, key: str, data: bytes, *, tag: str | None) -> str:
        """Compare-and-swap: store if the object still has `tag` (None: if there is none). Returns the new tag;
        Conflict if another writer was first."""
        ...

    def local_path(self, key: str) -> Path | None:
        """Where the object lies on this machine's disk, for a local store; None for a remote one."""
        ...
