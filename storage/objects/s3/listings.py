"""Lists objects and folders under a prefix. A long listing takes several requests."""

from collections.abc import Sequence
from typing import Any

from storage.objects.s3.refusals import Refused
from storage.objects.s3.requests import Requests
from storage.objects.store import Entry

OBJECTS_PER_PAGE = 1000
"""The largest number of objects in one answer to a listing."""


class Listings:
    def __init__(self, requests: Requests):
        self._requests = requests

    async def entries(self, prefix: str, after: str = "") -> Sequence[Entry]:
        """Return the objects whose keys start with a prefix and come after `after`."""
        start = {"StartAfter": self._requests.prefix + after} if after else {}
        pages = await self._pages(prefix, **start)
        objects = (found for page in pages for found in page.get("Contents", ()))
        entries = (Entry(found["Key"].removeprefix(self._requests.prefix), found["Size"]) for found in objects)
        return [entry for entry in entries if not entry.key.endswith("/")]  # S3 consoles mark folders with such names

    async def folders(self, prefix: str) -> Sequence[str]:
        """Return the names of the folders directly under a folder."""
        pages = await self._pages(prefix, Delimiter="/")
        found = (folder["Prefix"] for page in pages for folder in page.get("CommonPrefixes", ()))
        return sorted(name.removeprefix(self._requests.prefix + prefix).rstrip("/") for name in found)

    async def _pages(self, prefix: str, **parameters: Any) -> Sequence[dict[str, Any]]:
        pages: list[dict[str, Any]] = []
        more: dict[str, str] = {}
        while not pages or more:
            try:
                page = await self._requests.send(
                    "list_objects_v2", prefix, MaxKeys=OBJECTS_PER_PAGE, **parameters, **more
                )
            except Refused as refused:
                self._requests.fail(prefix, refused)
            pages.append(page)
            more = {"ContinuationToken": page["NextContinuationToken"]} if page.get("IsTruncated") else {}
        return pages
