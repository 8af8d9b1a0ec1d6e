"""Objects under an S3 prefix.

Every request goes through `_request`, which repeats it until the deadline, and the HTTP client below may repeat it
too. A conditional write can so be refused because it has already happened and only its answer was lost. Therefore
each write carries a token of its own in the object's metadata: one that is refused looks whether the token is there.
"""

import asyncio
import contextlib
import logging
import os
import random
import re
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar, cast
from urllib.parse import urlsplit

import aiohttp
import botocore.exceptions
import botocore.parsers
import fsspec.asyn
import s3fs

from storage.objects.store import Entry, check_key, check_prefix
from tba.errors import AlreadyExists, ConfigError, Conflict, Missing, StorageError, UnsafeStore

log = logging.getLogger(__name__)

A = TypeVar("A")
T = TypeVar("T")

_connecting = threading.Lock()
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_PART = 16 << 20  # bytes moved by one request
_SIDE_BY_SIDE = 8  # parts of one file, so at most 128 MiB of it in memory
_READS = 32
_PAGE = 1000
_PAUSE = 0.1, 5.0  # seconds between two tries, at first and at most
_SILENCE = 30.0  # seconds without a sign of the server, of half a deadline where that is less
_SETTINGS = {
    "connect_timeout": 5,
    "max_pool_connections": 64,
    "retries": {"total_max_attempts": 1, "mode": "standard"},
    # Not every server knows the newer checksums; whatever is worth it carries a sha256 of ours.
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
}
_UNANSWERED = (
    botocore.exceptions.ConnectionError,
    botocore.exceptions.HTTPClientError,
    botocore.exceptions.IncompleteReadError,
    botocore.parsers.ResponseParserError,
    aiohttp.ClientError,
    OSError,  # with it TimeoutError
)
_TRY_AGAIN = {408, 409, 429}  # and what begins with a 5, but for 501
_TRY_AGAIN_CODES = {"RequestTimeout", "SlowDown", "XAmzContentSHA256Mismatch", "IncompleteBody", "BadDigest"}
_OF_A_PREFIX = {"list_objects_v2", "list_multipart_uploads"}
_ESSENTIAL = {
    "get_object": "ETag",
    "head_object": "ETag",
    "put_object": "ETag",
    "create_multipart_upload": "UploadId",
    "upload_part": "ETag",
    "complete_multipart_upload": "ETag",
    "list_objects_v2": "IsTruncated",
}
"""What an answer has, unless something on its way has put another in its place: an empty listing is no empty answer."""


class _Cut(OSError):
    """An answer that is not all there, though the connection says so."""


class _Refused(Exception):
    """An answer that another try would not change."""

    def __init__(self, status: int, code: str, message: str):
        super().__init__(f"{code}: {message}" if message else code)
        self.status = status
        self.code = code


class _Upload(NamedTuple):
    """A multipart upload that is not completed."""

    key: str
    identity: str
    began: datetime | None  # None where the server does not say


class S3Store:
    """A bucket, or a prefix of one. Safe to use from several threads."""

    def __init__(self, url: str, *, deadline: float = 60.0):
        self._bucket, _, prefix = url.removeprefix("s3://").partition("/")
        if not _BUCKET.fullmatch(self._bucket):
            raise ConfigError("a store on S3 is s3://bucket/prefix, and this is not the name of a bucket")
        prefix = prefix.strip("/")
        self._prefix = f"{check_key(prefix)}/" if prefix else ""
        self._deadline = deadline
        with _connecting:
            self._connection = _connect(_environment(), min(_SILENCE, deadline / 2))
        self.url = f"s3://{self._bucket}/{prefix}".rstrip("/")

    def __str__(self) -> str:
        client: Any = self._connection.s3
        endpoint = urlsplit(client.meta.endpoint_url)
        return f"{self.url} at {endpoint.hostname}{f':{endpoint.port}' if endpoint.port else ''}"

    def create(self, key: str, data: bytes) -> None:
        self._run(self._create, check_key(key), data)

    def read(self, key: str) -> bytes:
        return self._run(self._read, check_key(key))

    def read_range(self, key: str, start: int, length: int) -> bytes:
        return self._run(self._read_range, check_key(key), start, length)

    def read_many(self, keys: Sequence[str]) -> Sequence[bytes]:
        return self._run(_side_by_side, _READS, self._read, [check_key(key) for key in keys])

    def exists(self, key: str) -> bool:
        return self._run(self._look, check_key(key)) is not None

    def folders(self, prefix: str = "") -> Sequence[str]:
        return self._run(self._folders, check_prefix(prefix))

    def list(self, prefix: str = "", *, after: str = "") -> list[Entry]:
        return sorted(self._run(self._entries, check_prefix(prefix), after))

    def upload(self, path: Path, key: str) -> None:
        with self._naming(key, f"cannot be read from {path}"):
            self._run(self._upload, path, check_key(key))

    def download(self, key: str, path: Path) -> None:
        with self._naming(key, f"cannot be written to {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._run(self._download, check_key(key), path)

    def delete(self, key: str) -> None:
        self._run(self._delete, check_key(key))

    def unfinished(self, prefix: str = "") -> Sequence[str]:
        return sorted({it.key for it in self._run(self._begun, check_prefix(prefix))})

    def discard(self, key: str) -> None:
        self._run(self._discard, check_key(key))

    def discard_older(self, prefix: str, seconds: float) -> Sequence[str]:
        return self._run(self._discard_older, check_prefix(prefix), seconds)

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
        """An object of any name: one that others have put into a bucket, to be read and no more."""
        bucket, _, key = url.removeprefix("s3://").partition("/")
        store = cls(f"s3://{bucket}")
        return store._run(store._read, key)

    @classmethod
    def names_in(cls, url: str) -> Sequence[str]:
        """The objects right in a folder of others, likewise."""
        bucket, _, folder = url.removeprefix("s3://").partition("/")
        store, prefix = cls(f"s3://{bucket}"), f"{folder}/" if folder else ""
        names = [entry.key.removeprefix(prefix) for entry in store._run(store._entries, prefix, "")]
        return [name for name in names if "/" not in name]

    @contextmanager
    def _naming(self, key: str, trouble: str) -> Iterator[None]:
        """What this machine's disk refuses, as an error that names the key."""
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(f"{self.url}/{key} {trouble}: {error.strerror or error}") from error

    def _run(self, work: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> T:
        """On the connection's own thread, for whichever thread asks."""
        return cast(T, fsspec.asyn.sync(self._connection.loop, work, *arguments))

    async def _create(self, key: str, data: bytes) -> None:
        if await self._write(key, data, IfNoneMatch="*") is None:
            raise AlreadyExists(f"{self.url}/{key} exists already")

    async def _replace(self, key: str, data: bytes, tag: str | None) -> str:
        """With the tag as it is, not in quotes: Ceph's gateway compares it literally."""
        condition = {"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}
        written = await self._write(key, data, **condition)
        if written is None:
            raise Conflict(f"{self.url}/{key} was changed by another writer")
        return written

    async def _write(self, key: str, data: bytes, **condition: str) -> str | None:
        """The tag of what was written; None if the condition did not hold."""
        token = _token(len(data))
        try:
            return _tag(await self._request("put_object", key, Body=data, Metadata=token, **condition))
        except _Refused as refused:
            if refused.status != 412 and refused.code != "NoSuchKey":
                self._fail(key, refused)
            found = await self._look(key)
            return _tag(found) if found and found["Metadata"] == token else None

    async def _read(self, key: str) -> bytes:
        try:
            return (await self._request("get_object", key))["Body"]
        except _Refused as refused:
            self._fail(key, refused)

    async def _read_range(self, key: str, start: int, length: int) -> bytes:
        try:
            answer = await self._request("get_object", key, Range=f"bytes={start}-{start + length - 1}")
            return answer["Body"]
        except _Refused as refused:
            if refused.status != 416:  # the object ends before
                self._fail(key, refused)
            return b""

    async def _look(self, key: str) -> dict[str, Any] | None:
        """Size, tag and metadata of an object, if there is one."""
        try:
            return await self._request("head_object", key)
        except _Refused as refused:
            if refused.status != 404:
                self._fail(key, refused)
            return None

    async def _read_tagged(self, key: str) -> tuple[bytes, str] | None:
        try:
            answer = await self._request("get_object", key)
        except _Refused as refused:
            if refused.code != "NoSuchKey":
                self._fail(key, refused)
            return None
        return answer["Body"], _tag(answer)

    async def _delete(self, key: str) -> None:
        try:
            await self._request("delete_object", key)
        except _Refused as refused:
            if refused.code != "NoSuchKey":
                self._fail(key, refused)

    async def _entries(self, prefix: str, after: str) -> Sequence[Entry]:
        start = {"StartAfter": self._prefix + after} if after else {}
        pages = await self._pages(prefix, **start)
        objects = (found for page in pages for found in page.get("Contents", ()))
        entries = (Entry(found["Key"].removeprefix(self._prefix), found["Size"]) for found in objects)
        return [entry for entry in entries if not entry.key.endswith("/")]  # a console's mark of a folder

    async def _folders(self, prefix: str) -> Sequence[str]:
        pages = await self._pages(prefix, Delimiter="/")
        found = (folder["Prefix"] for page in pages for folder in page.get("CommonPrefixes", ()))
        return sorted(name.removeprefix(self._prefix + prefix).rstrip("/") for name in found)

    async def _pages(self, prefix: str, **parameters: Any) -> Sequence[dict[str, Any]]:
        pages: list[dict[str, Any]] = []
        more: dict[str, str] = {}
        while not pages or more:
            try:
                page = await self._request("list_objects_v2", prefix, MaxKeys=_PAGE, **parameters, **more)
            except _Refused as refused:
                self._fail(prefix, refused)
            pages.append(page)
            more = {"ContinuationToken": page["NextContinuationToken"]} if page.get("IsTruncated") else {}
        return pages

    async def _upload(self, path: Path, key: str) -> None:
        size = path.stat().st_size
        try:
            if size <= _PART:
                data = await asyncio.to_thread(path.read_bytes)
                await self._request("put_object", key, Body=data, Metadata=_token(len(data)))
            else:
                await self._upload_parts(path, key, size)
        except _Refused as refused:
            self._fail(key, refused)

    async def _upload_parts(self, path: Path, key: str, size: int) -> None:
        length = max(_PART, -(-size // 10_000))  # no upload has more than 10,000 parts
        token = _token(size)
        begun = await self._request("create_multipart_upload", key, Metadata=token)
        upload = {"UploadId": begun["UploadId"]}

        async def send(number: int) -> dict[str, Any]:
            part = await asyncio.to_thread(_read_part, path, number * length, length)
            answer = await self._request("upload_part", key, PartNumber=number + 1, Body=part, **upload)
            return {"PartNumber": number + 1, "ETag": answer["ETag"]}

        try:
            parts = await _side_by_side(_SIDE_BY_SIDE, send, range(-(-size // length)))
            await self._request("complete_multipart_upload", key, MultipartUpload={"Parts": parts}, **upload)
        except BaseException as error:
            if isinstance(error, _Refused) and error.code == "NoSuchUpload":
                found = await self._look(key)
                if found and found["Metadata"] == token:
                    return  # completed by a try whose answer was lost
                raise StorageError(f"{self.url}/{key}: its upload was ended by somebody else") from None
            await self._abort(key, begun["UploadId"], within=5.0)
            raise

    async def _begun(self, prefix: str) -> Sequence[_Upload]:
        """Return the uploads under a prefix that are not completed."""
        found: list[_Upload] = []
        more: dict[str, str] | None = {}
        while more is not None:
            try:
                page = await self._request("list_multipart_uploads", prefix, MaxUploads=_PAGE, **more)
            except _Refused as refused:  # a server, or a policy, without it: then the bucket's own rule must free them
                log.info("%s/%s: unfinished uploads cannot be listed: %s", self.url, prefix, refused)
                return found
            uploads = page.get("Uploads", ())
            found += [_Upload(it["Key"].removeprefix(self._prefix), it["UploadId"], _time(it)) for it in uploads]
            markers = {"KeyMarker": page.get("NextKeyMarker"), "UploadIdMarker": page.get("NextUploadIdMarker")}
            more = {name: marker for name, marker in markers.items() if marker} if page.get("IsTruncated") else None
        return found

    async def _discard(self, key: str) -> None:
        for upload in await self._begun(key):
            if upload.key == key:
                await self._abort(key, upload.identity)

    async def _discard_older(self, prefix: str, seconds: float) -> Sequence[str]:
        before = datetime.now(UTC) - timedelta(seconds=seconds)
        freed: set[str] = set()
        for upload in await self._begun(prefix):
            is_old = upload.began is not None and upload.began < before and await self._rests(upload, before)
            if is_old and await self._abort(upload.key, upload.identity):
                freed.add(upload.key)
        return sorted(freed)

    async def _rests(self, upload: _Upload, since: datetime) -> bool:
        """Return True if an upload has received no part since a time; False also where the server does not tell."""
        more: dict[str, int] | None = {}
        while more is not None:
            try:
                page = await self._request("list_parts", upload.key, UploadId=upload.identity, **more)
            except _Refused:  # it has ended, or such questions are not answered
                return False
            if any(part["LastModified"] >= since for part in page.get("Parts", ())):
                return False
            more = {"PartNumberMarker": page["NextPartNumberMarker"]} if page.get("IsTruncated") else None
        return True

    async def _abort(self, key: str, identity: str, *, within: float | None = None) -> bool:
        """Free the parts of an upload; what cannot be freed in time is left to whoever sweeps up. True if they are."""
        request = self._request("abort_multipart_upload", key, UploadId=identity)
        with contextlib.suppress(_Refused, StorageError, TimeoutError):
            await asyncio.wait_for(request, within)
            return True
        return False

    async def _download(self, key: str, path: Path) -> None:
        found = await self._look(key)
        if found is None:
            raise Missing(f"{self.url}/{key} does not exist")

        async def receive(start: int) -> None:
            answer = await self._request("get_object", key, Range=f"bytes={start}-{start + _PART - 1}")
            await asyncio.to_thread(_write_part, file, start, answer["Body"])

        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            await _side_by_side(_SIDE_BY_SIDE, receive, range(0, found["ContentLength"], _PART))
        except BaseException as error:
            path.unlink(missing_ok=True)  # rather than a part of it
            if isinstance(error, _Refused):
                self._fail(key, error)
            raise
        finally:
            os.close(file)

    async def _request(self, operation: str, key: str, **parameters: Any) -> dict[str, Any]:
        """One request, repeated while it goes unanswered or the server is busy, until the deadline. A body comes as
        bytes. Raises _Refused for any other answer than yes, StorageError for none in time."""
        where = "Prefix" if operation in _OF_A_PREFIX else "Key"
        send = partial(self._send, operation, Bucket=self._bucket, **{where: self._prefix + key}, **parameters)
        ends = time.monotonic() + self._deadline
        tries, trouble = 0, ""
        while True:
            try:
                return await asyncio.wait_for(send(), ends - time.monotonic())
            except (*_UNANSWERED, botocore.exceptions.BotoCoreError) as error:
                refused = _refusal(error, operation)
                if refused:
                    raise refused from None
                if not (trouble and isinstance(error, TimeoutError)):  # the last try may have had no time at all
                    trouble = _describe(error)
            pause = min(_PAUSE[0] * 2**tries, _PAUSE[1]) * random.uniform(0.5, 1.0)
            if time.monotonic() + pause >= ends:
                raise StorageError(f"{self.url}/{key}: {trouble} (tried for {self._deadline:g} s)")
            if tries == 0:
                log.warning("%s/%s: %s; trying again for up to %g s", self.url, key, trouble, self._deadline)
            await asyncio.sleep(pause)
            tries += 1

    async def _send(self, operation: str, **parameters: Any) -> dict[str, Any]:
        answer = await self._connection._call_s3(operation, **parameters)
        if operation == "get_object":
            async with answer["Body"] as body:
                answer["Body"] = await body.read()
            expected = _promised(answer)
            if expected not in (None, len(answer["Body"])):
                raise _Cut(f"only {len(answer['Body'])} of {expected} bytes were received")
        if _ESSENTIAL.get(operation, "ResponseMetadata") not in answer:
            raise _Cut(f"the answer came without its {_ESSENTIAL[operation]}")
        return answer

    def _fail(self, key: str, refused: _Refused) -> NoReturn:
        """A refusal as an error that names the key."""
        if refused.code == "NoSuchBucket":
            raise StorageError(f"{self.url}: there is no bucket {self._bucket!r}") from None
        if refused.status == 404:
            raise Missing(f"{self.url}/{key} does not exist") from None
        if refused.status == 501:
            raise UnsafeStore(f"{self}: this store cannot do what is asked of it ({refused})") from None
        raise StorageError(f"{self.url}/{key}: {refused}") from None


def _refusal(error: Exception, operation: str) -> _Refused | None:
    """What is final; None if another try may do better."""
    if said := _said(error):
        busy = said.status in _TRY_AGAIN or (said.status >= 500 and said.status != 501)
        # The body of a 404 says what there is not: object, bucket or upload. Only the answer to HEAD has no body.
        bare = said.status == 404 and said.code == "404" and operation != "head_object"
        return None if busy or bare or said.code in _TRY_AGAIN_CODES else said
    if isinstance(error, _UNANSWERED) and not isinstance(error, botocore.exceptions.SSLError):
        return None
    return _Refused(0, type(error).__name__, _describe(error))


def _said(error: Exception) -> _Refused | None:
    """What the server said, if it said anything."""
    response = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
    if not isinstance(response, dict):
        return None
    status, said = response["ResponseMetadata"]["HTTPStatusCode"], response.get("Error", {})
    return _Refused(status, str(said.get("Code") or status), str(said.get("Message") or ""))


def _describe(error: Exception) -> str:
    text = str(_said(error) or error) or ("no answer" if isinstance(error, TimeoutError) else type(error).__name__)
    return re.sub(r"//[^/@\s]*@", "//", text)  # an endpoint may carry a password


def _time(upload: dict[str, Any]) -> datetime | None:
    """Return when an upload began; None unless the server says so with a time zone."""
    began = upload.get("Initiated")
    return began if isinstance(began, datetime) and began.tzinfo else None


def _token(length: int) -> dict[str, str]:
    return {"write": secrets.token_hex(16), "length": str(length)}


def _promised(answer: dict[str, Any]) -> int | None:
    """How many bytes belong into the body of an answer; None if nothing but its Content-Length says so."""
    if part := re.fullmatch(r"bytes (\d+)-(\d+)/.*", answer.get("ContentRange", "")):
        return int(part[2]) - int(part[1]) + 1
    length = answer.get("Metadata", {}).get("length", "")
    return int(length) if length.isdecimal() else None


def _tag(answer: dict[str, Any]) -> str:
    return answer["ETag"].strip('"')


def _read_part(path: Path, start: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(length)


def _write_part(file: int, start: int, data: bytes) -> None:
    """All of it: on a disk that is nearly full one call writes less than it was given, and only the next one fails."""
    left = memoryview(data)
    while left:
        written = os.pwrite(file, left, start)
        left, start = left[written:], start + written


async def _side_by_side(limit: int, work: Callable[[A], Coroutine[Any, Any, T]], items: Iterable[A]) -> list[T]:
    """All results in order, never more than `limit` under way; the first failure ends the rest."""
    turn = asyncio.Semaphore(limit)

    async def one(item: A) -> T:
        async with turn:
            return await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(item)) for item in items]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def _environment() -> tuple[tuple[str, str], ...]:
    """What a connection depends on: the settings, and the process, as threads do not survive a fork."""
    settings = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    return (*sorted(settings.items()), ("pid", str(os.getpid())))


@lru_cache(maxsize=8)
def _connect(environment: tuple[tuple[str, str], ...], silence: float) -> s3fs.S3FileSystem:
    """One connection per process, environment and patience, shared by its stores."""
    settings = {**_SETTINGS, "read_timeout": silence}
    connection = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False, config_kwargs=settings)
    connection.retries = 1
    try:
        connection.connect()
    except (botocore.exceptions.BotoCoreError, ValueError) as error:
        raise ConfigError(f"the AWS_* environment does not make a connection to S3: {_describe(error)}") from None
    return connection
