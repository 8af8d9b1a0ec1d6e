"""Finds and frees multipart uploads that are not completed. Their parts hold space, but no listing of objects shows
them."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from storage.objects.s3.refusals import Refused
from storage.objects.s3.requests import Requests
from tba.errors import StorageError

log = logging.getLogger(__name__)

UPLOADS_PER_PAGE = 1000
"""The largest number of uploads in one answer to a listing."""


class Upload(NamedTuple):
    """A multipart upload that is not completed."""

    key: str
    identity: str
    began: datetime | None  # None where the server does not say


class UnfinishedUploads:
    """Finds the uploads under a prefix that are not completed, and frees their parts."""

    def __init__(self, requests: Requests):
        self._requests = requests

    async def list(self, prefix: str) -> Sequence[Upload]:
        """Return the uploads under a prefix that are not completed. If the server refuses to list them, return those
        listed so far."""
        found: list[Upload] = []
        more: dict[str, str] | None = {}
        while more is not None:
            try:
                page = await self._requests.send("list_multipart_uploads", prefix, MaxUploads=UPLOADS_PER_PAGE, **more)
            except Refused as refused:  # not supported or not allowed: a lifecycle rule of the bucket must free them
                log.info("%s/%s: unfinished uploads cannot be listed: %s", self._requests.url, prefix, refused)
                return found
            found += [self._understood(upload) for upload in page.get("Uploads", ())]
            markers = {"KeyMarker": page.get("NextKeyMarker"), "UploadIdMarker": page.get("NextUploadIdMarker")}
            more = {name: marker for name, marker in markers.items() if marker} if page.get("IsTruncated") else None
        return found

    def _understood(self, upload: dict[str, Any]) -> Upload:
        key = upload["Key"].removeprefix(self._requests.prefix)
        began = upload.get("Initiated")
        says_when = isinstance(began, datetime) and began.tzinfo is not None
        return Upload(key, upload["UploadId"], began if says_when else None)

    async def discard(self, key: str) -> None:
        """Free the parts of all uploads of a key."""
        for upload in await self.list(key):
            if upload.key == key:
                await self.abort(key, upload.identity)

    async def discard_older(self, prefix: str, seconds: float) -> Sequence[str]:
        """Free the parts of uploads that began, and received their last part, more than `seconds` ago. Return their
        keys."""
        before = datetime.now(UTC) - timedelta(seconds=seconds)
        freed: set[str] = set()
        for upload in await self.list(prefix):
            is_old = upload.began is not None and upload.began < before and await self._rests(upload, before)
            if is_old and await self.abort(upload.key, upload.identity):
                freed.add(upload.key)
        return sorted(freed)

    async def _rests(self, upload: Upload, since: datetime) -> bool:
        """True if an upload has received no part after the time `since`. False if the server does not say."""
        more: dict[str, int] | None = {}
        while more is not None:
            try:
                page = await self._requests.send("list_parts", upload.key, UploadId=upload.identity, **more)
            except Refused:  # the upload has ended, or the server does not list parts
                return False
            if any(part["LastModified"] >= since for part in page.get("Parts", ())):
                return False
            more = {"PartNumberMarker": page["NextPartNumberMarker"]} if page.get("IsTruncated") else None
        return True

    async def abort(self, key: str, identity: str, *, within: float | None = None) -> bool:
        """Free the parts of an upload. Return True if the server says that they are free, and False if it refuses or
        does not answer `within` so many seconds; a later sweep then frees them."""
        request = self._requests.send("abort_multipart_upload", key, UploadId=identity)
        with contextlib.suppress(Refused, StorageError, TimeoutError):
            await asyncio.wait_for(request, within)
            return True
        return False
