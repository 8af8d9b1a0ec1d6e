"""Sends requests to a bucket, repeats them until a deadline, and makes conditional writes safe to repeat.

Every request goes through `send`, which repeats it until the deadline. The HTTP client may repeat the request too. So a
conditional write can be refused because an earlier try has already succeeded and only its answer was lost. Therefore
each write puts a token of its own into the object's metadata. If a write is refused, it checks whether the stored
object has this token: then the write has succeeded.
"""

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NoReturn, TypeVar, cast
from urllib.parse import urlsplit

import botocore.exceptions
import fsspec.asyn

from storage.objects.s3.connection import connect
from storage.objects.s3.refusals import UNANSWERED, Refused, check_whole, describe, final_refusal
from tba.errors import Missing, StorageError, UnsafeStore

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds to wait before the second try, and the longest wait between two tries."""

_OF_A_PREFIX = {"list_objects_v2", "list_multipart_uploads"}


class Requests:
    """Requests for the objects of a bucket whose names start with a prefix. Keys are relative to the prefix."""

    def __init__(self, bucket: str, prefix: str, *, deadline: float):
        self.bucket, self.prefix, self.deadline = bucket, prefix, deadline
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._connection = connect(deadline=deadline)

    @property
    def endpoint(self) -> str:
        """Host and port of the server."""
        client: Any = self._connection.s3
        endpoint = urlsplit(client.meta.endpoint_url)
        return f"{endpoint.hostname}{f':{endpoint.port}' if endpoint.port else ''}"

    def run(self, work: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> T:
        """Run a coroutine on the connection's own thread and return its result. Any thread may call this method."""
        return cast(T, fsspec.asyn.sync(self._connection.loop, work, *arguments))

    async def send(self, operation: str, key: str, **parameters: Any) -> dict[str, Any]:
        """Send a request, and repeat it until the deadline while there is no answer or the server is busy. Return the
        answer, with its body as bytes. Raise Refused if the server refuses for good, StorageError if there is no
        answer in time."""
        where = "Prefix" if operation in _OF_A_PREFIX else "Key"
        send = partial(self._send_once, operation, Bucket=self.bucket, **{where: self.prefix + key}, **parameters)
        ends = time.monotonic() + self.deadline
        tries, trouble = 0, ""
        while True:
            try:
                return await asyncio.wait_for(send(), ends - time.monotonic())
            except (*UNANSWERED, botocore.exceptions.BotoCoreError) as error:
                refused = final_refusal(error, operation)
                if refused:
                    raise refused from None
                if not (trouble and isinstance(error, TimeoutError)):  # the last try may have had almost no time
                    trouble = describe(error)
            pause = min(FIRST_PAUSE * 2**tries, LONGEST_PAUSE) * random.uniform(0.5, 1.0)
            if time.monotonic() + pause >= ends:
                raise StorageError(f"{self.url}/{key}: {trouble} (tried for {self.deadline:g} s)")
            if tries == 0:
                log.warning("%s/%s: %s; trying again for up to %g s", self.url, key, trouble, self.deadline)
            await asyncio.sleep(pause)
            tries += 1

    async def _send_once(self, operation: str, **parameters: Any) -> dict[str, Any]:
        answer = await self._connection._call_s3(operation, **parameters)
        if operation == "get_object":
            async with answer["Body"] as body:
                answer["Body"] = await body.read()
        check_whole(operation, answer)
        return answer

    async def head(self, key: str) -> dict[str, Any] | None:
        """Return what the server says about an object: its size, tag and metadata. Return None if there is no such
        object."""
        try:
            return await self.send("head_object", key)
        except Refused as refused:
            if refused.status != 404:
                self.fail(key, refused)
            return None

    async def write(self, key: str, data: bytes, **condition: str) -> str | None:
        """Write an object and return its tag; None if the condition did not hold, so that nothing was written."""
        token = make_token(len(data))
        try:
            return tag_of(await self.send("put_object", key, Body=data, Metadata=token, **condition))
        except Refused as refused:
            if refused.status != 412 and refused.code != "NoSuchKey":
                self.fail(key, refused)
            return await self.tag_written_with(key, token)

    async def tag_written_with(self, key: str, token: dict[str, str]) -> str | None:
        """Return the tag of an object if the write with this token stored it and only the answer was lost; else
        None."""
        found = await self.head(key)
        return tag_of(found) if found and found["Metadata"] == token else None

    def fail(self, key: str, refused: Refused) -> NoReturn:
        """Raise the error of this project that a refusal stands for. The error names the key."""
        if refused.code == "NoSuchBucket":
            raise StorageError(f"{self.url}: there is no bucket {self.bucket!r}") from None
        if refused.status == 404:
            raise Missing(f"{self.url}/{key} does not exist") from None
        if refused.status == 501:
            raise UnsafeStore(
                f"{self.url} at {self.endpoint}: this store does not support a request that is needed ({refused})"
            ) from None
        raise StorageError(f"{self.url}/{key}: {refused}") from None


def make_token(length: int) -> dict[str, str]:
    """Return new metadata that identifies one write of `length` bytes."""
    return {"write": secrets.token_hex(16), "length": str(length)}


def tag_of(answer: dict[str, Any]) -> str:
    return answer["ETag"].strip('"')
