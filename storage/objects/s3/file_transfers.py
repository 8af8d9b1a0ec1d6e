"""Uploads and downloads files. A large file moves in parts, several at the same time."""

import asyncio
import os
from pathlib import Path
from typing import Any

from storage.objects.s3.refusals import Refused
from storage.objects.s3.requests import Requests, make_token
from storage.objects.s3.side_by_side import side_by_side
from storage.objects.s3.unfinished_uploads import UnfinishedUploads
from tba.errors import Missing, StorageError

PART = 16 << 20
"""Bytes of a file that one request moves. An upload that would need more than `_MOST_PARTS` parts uses larger parts."""

_PARTS_AT_ONCE = 8  # of one file: 128 MiB in memory, more for a file that needs larger parts
_MOST_PARTS = 10_000  # of one upload


class FileTransfers:
    def __init__(self, requests: Requests, uploads: UnfinishedUploads):
        self._requests, self._uploads = requests, uploads

    async def upload(self, path: Path, key: str) -> None:
        size = path.stat().st_size
        try:
            if size <= PART:
                data = await asyncio.to_thread(path.read_bytes)
                await self._requests.send("put_object", key, Body=data, Metadata=make_token(len(data)))
            else:
                await self._upload_parts(path, key, size)
        except Refused as refused:
            self._requests.fail(key, refused)

    async def _upload_parts(self, path: Path, key: str, size: int) -> None:
        length = max(PART, -(-size // _MOST_PARTS))
        token = make_token(size)
        begun = await self._requests.send("create_multipart_upload", key, Metadata=token)
        upload = {"UploadId": begun["UploadId"]}

        async def send(number: int) -> dict[str, Any]:
            part = await asyncio.to_thread(_read_part, path, number * length, length)
            answer = await self._requests.send("upload_part", key, PartNumber=number + 1, Body=part, **upload)
            return {"PartNumber": number + 1, "ETag": answer["ETag"]}

        try:
            parts = await side_by_side(_PARTS_AT_ONCE, send, range(-(-size // length)))
            await self._requests.send("complete_multipart_upload", key, MultipartUpload={"Parts": parts}, **upload)
        except BaseException as error:
            if isinstance(error, Refused) and error.code == "NoSuchUpload":
                if await self._requests.tag_written_with(key, token) is not None:
                    return  # an earlier try has completed the upload, and only its answer was lost
                raise StorageError(f"{self._requests.url}/{key}: its upload was aborted by another process") from None
            await self._uploads.abort(key, begun["UploadId"], within=5.0)
            raise

    async def download(self, key: str, path: Path) -> None:
        found = await self._requests.head(key)
        if found is None:
            raise Missing(f"{self._requests.url}/{key} does not exist")

        async def receive(start: int) -> None:
            answer = await self._requests.send("get_object", key, Range=f"bytes={start}-{start + PART - 1}")
            await asyncio.to_thread(_write_part, file, start, answer["Body"])

        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            await side_by_side(_PARTS_AT_ONCE, receive, range(0, found["ContentLength"], PART))
        except BaseException as error:
            path.unlink(missing_ok=True)  # leave no partial file
            if isinstance(error, Refused):
                self._requests.fail(key, error)
            raise
        finally:
            os.close(file)


def _read_part(path: Path, start: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(length)


def _write_part(file: int, start: int, data: bytes) -> None:
    """Write all of the data. On a disk that is nearly full, one call writes only a part of the data, and only the next
    call fails."""
    left = memoryview(data)
    while left:
        written = os.pwrite(file, left, start)
        left, start = left[written:], start + written
