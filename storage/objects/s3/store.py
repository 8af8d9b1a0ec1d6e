"""A store that keeps its objects under an S3 prefix."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from storage.objects.s3.file_transfers import FileTransfers
from storage.objects.s3.listings import Listings
from storage.objects.s3.refusals import Refused
from storage.objects.s3.requests import Requests, tag_of
from storage.objects.s3.side_by_side import side_by_side
from storage.objects.s3.unfinished_uploads import UnfinishedUploads
from storage.objects.store import Entry, check_key, check_prefix
from tba.errors import AlreadyExists, ConfigError, Conflict, StorageError

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_READS_AT_ONCE = 32


class S3Store:
    """A bucket, or a prefix of one. Safe to use from several threads."""

    def __init__(self, url: str, *, deadline: float = 60.0):
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        if not _BUCKET.fullmatch(bucket):
            raise ConfigError("a store on S3 is s3://bucket/prefix; the name of the bucket is missing or invalid")
        prefix = prefix.strip("/")
        self.requests = Requests(bucket, f"{check_key(prefix)}/" if prefix else "", deadline=deadline)
        self.uploads = UnfinishedUploads(self.requests)
        self._listings = Listings(self.requests)
        self._transfers = FileTransfers(self.requests, self.uploads)
        self._run = self.requests.run
        self.url = self.requests.url

    def __str__(self) -> str:
        return f"{self.url} at {self.requests.endpoint}"

    def create(self, key: str, data: bytes) -> None:
        self._run(self._create, check_key(key), data)

    def read(self, key: str) -> bytes:
        return self._run(self._read, check_key(key))

    def read_range(self, key: str, start: int, length: int) -> bytes:
        return self._run(self._read_range, check_key(key), start, length)

    def read_many(self, keys: Sequence[str]) -> Sequence[bytes]:
        return self._run(side_by_side, _READS_AT_ONCE, self._read, [check_key(key) for key in keys])

    def exists(self, key: str) -> bool:
        return self._run(self.requests.head, check_key(key)) is not None

    def folders(self, prefix: str = "") -> Sequence[str]:
        return self._run(self._listings.folders, check_prefix(prefix))

    def list(self, prefix: str = "", *, after: str = "") -> list[Entry]:
        return sorted(self._run(self._listings.entries, check_prefix(prefix), after))

    def upload(self, path: Path, key: str, *, may_link: bool = False) -> None:
        with self._naming(key, f"cannot be read from {path}"):
            self._run(self._transfers.upload, path, check_key(key))

    def download(self, key: str, path: Path) -> None:
        with self._naming(key, f"cannot be written to {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._run(self._transfers.download, check_key(key), path)

    def delete(self, key: str) -> None:
        self._run(self._delete, check_key(key))

    def unfinished(self, prefix: str = "") -> Sequence[str]:
        return sorted({upload.key for upload in self._run(self.uploads.list, check_prefix(prefix))})

    def discard(self, key: str) -> None:
        self._run(self.uploads.discard, check_key(key))

    def discard_older(self, prefix: str, seconds: float) -> Sequence[str]:
        return self._run(self.uploads.discard_older, check_prefix(prefix), seconds)

    def irregular(self, prefix: str = "") -> Sequence[str]:
        check_prefix(prefix)
        return []

    def read_tagged(self, key: str) -> tuple[bytes, str] | None:
        return self._run(self._read_tagged, check_key(key))

    def replace(self, key: str, data: bytes, *, tag: str | None) -> str:
        return self._run(self._replace, check_key(key), data, tag)

    def local_path(self, key: str) -> Path | None:
        check_key(key)
        return None

    @classmethod
    def read_any(cls, url: str) -> bytes:
        """Return the bytes of an object that others have put into a bucket. Its name need not be a valid key of a
        store."""
        bucket, _, key = url.removeprefix("s3://").partition("/")
        store = cls(f"s3://{bucket}")
        return store._run(store._read, key)

    @classmethod
    def names_in(cls, url: str) -> Sequence[str]:
        """Return the names of the objects directly in a folder of any bucket, which others may have stored."""
        bucket, _, folder = url.removeprefix("s3://").partition("/")
        store, prefix = cls(f"s3://{bucket}"), f"{folder}/" if folder else ""
        names = [entry.key.removeprefix(prefix) for entry in store._run(store._listings.entries, prefix)]
        return [name for name in names if "/" not in name]

    @contextmanager
    def _naming(self, key: str, trouble: str) -> Iterator[None]:
        """Convert an error of this machine's disk into a StorageError that names the key."""
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(f"{self.url}/{key} {trouble}: {error.strerror or error}") from error

    async def _create(self, key: str, data: bytes) -> None:
        if await self.requests.write(key, data, IfNoneMatch="*") is None:
            raise AlreadyExists(f"{self.url}/{key} exists already")

    async def _replace(self, key: str, data: bytes, tag: str | None) -> str:
        """Replace an object. The tag is sent without quotes, because Ceph's gateway compares it literally."""
        condition = {"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}
        written = await self.requests.write(key, data, **condition)
        if written is None:
            raise Conflict(f"{self.url}/{key} was changed by another writer")
        return written

    async def _read(self, key: str) -> bytes:
        try:
            return (await self.requests.send("get_object", key))["Body"]
        except Refused as refused:
            self.requests.fail(key, refused)

    async def _read_range(self, key: str, start: int, length: int) -> bytes:
        try:
            answer = await self.requests.send("get_object", key, Range=f"bytes={start}-{start + length - 1}")
            return answer["Body"]
        except Refused as refused:
            if refused.status != 416:  # 416: the object ends before `start`
                self.requests.fail(key, refused)
            return b""

    async def _read_tagged(self, key: str) -> tuple[bytes, str] | None:
        try:
            answer = await self.requests.send("get_object", key)
        except Refused as refused:
            if refused.code != "NoSuchKey":
                self.requests.fail(key, refused)
            return None
        return answer["Body"], tag_of(answer)

    async def _delete(self, key: str) -> None:
        try:
            await self.requests.send("delete_object", key)
        except Refused as refused:
            if refused.code != "NoSuchKey":
                self.requests.fail(key, refused)
