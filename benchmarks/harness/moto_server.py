"""moto's server with atomic conditional writes, as on real servers: moto alone looks, and then stores.

Uploads also have the time at which they began, which moto does not keep. An upload to a key with `begun-long-ago` in
its name began long ago, and the parts of an upload with `sent-long-ago` were sent long ago.

python -m benchmarks.harness.moto_server -p PORT
"""

import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from moto import backends
from moto.s3.models import FakeKey, FakeMultipart
from moto.s3.responses import S3Response
from moto.server import main

LONG_AGO = datetime(2010, 11, 10)

lock, put_object = threading.Lock(), S3Response.put_object
make_upload, set_part, serialized = FakeMultipart.__init__, FakeMultipart.set_part, S3Response.serialized
began: dict[str, datetime] = {}  # by id of the upload


def put_alone(self: S3Response) -> Any:
    with lock:
        return put_object(self)


def make_dated_upload(self: FakeMultipart, key_name: str, *arguments: Any, **options: Any) -> None:
    make_upload(self, key_name, *arguments, **options)
    began[self.id] = LONG_AGO if "begun-long-ago" in key_name else datetime.now(UTC)


def set_dated_part(self: FakeMultipart, part_id: int, value: bytes) -> FakeKey:
    part = set_part(self, part_id, value)
    if "sent-long-ago" in self.key_name:
        part.last_modified = LONG_AGO
    return part


def serialized_with_dates(self: S3Response, action_result: Any) -> Any:
    result = action_result.result
    if isinstance(result, dict):
        for upload in result.get("Uploads", ()):
            upload["Initiated"] = f"{began[upload['UploadId']]:%Y-%m-%dT%H:%M:%S.000Z}"
    return serialized(self, action_result)


def keep_names_of_services() -> None:
    """Look for moto's services once, not at every request, which takes longer than to answer it."""
    names: Sequence[str] = tuple(backends.list_of_moto_modules())
    backends.list_of_moto_modules = lambda: names


if __name__ == "__main__":
    keep_names_of_services()
    S3Response.put_object = put_alone
    FakeMultipart.__init__ = make_dated_upload
    FakeMultipart.set_part = set_dated_part
    S3Response.serialized = serialized_with_dates
    main()
